"""``python -m torch_xla_ckpt``: the command line ``xc``."""

from torch_xla_ckpt.cli import main

if __name__ == "__main__":
    main()
