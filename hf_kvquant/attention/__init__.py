"""Decode attention that reads packed codes. ``interface`` meets transformers, ``backends`` chooses, ``compiled`` runs
``decode`` under torch.compile, ``codes`` holds its inner loops, ``reference`` is the oracle."""
