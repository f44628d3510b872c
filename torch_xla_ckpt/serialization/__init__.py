"""Pickles in archives: what ``torch.save`` writes, read without running what a file names.

``archive`` parses the zip archive, ``machine`` executes the pickle, and ``plain``, ``arrays`` and ``tensors`` rebuild
values. Each byte is parsed once, by this code: torch.load is not involved, so no two parsers can disagree about a file.
The alternative was to check an archive and to hand a repacked one to ``torch.load(weights_only=True)``. That leaves
numpy's and torch's constructors to states that a pickle sets, and takes several times as long for small objects.
"""
