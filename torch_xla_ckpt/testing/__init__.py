"""Help for tests of programs that save and restore.

``assert_same_state`` compares two states bit by bit, whatever their shardings::

    from torch_xla_ckpt.testing import assert_same_state

    assert_same_state(model, restored_model)

``compare`` walks the states, ``tensors`` compares two tensors shard by shard, ``elements`` compares and shows elements.
"""

from torch_xla_ckpt.testing.compare import assert_same_state

__all__ = ["assert_same_state"]
