"""The label of positions and samples that no loss and no score counts, such as padding."""

IGNORED = -100  # as for cross entropy in PyTorch and transformers, and in datamodules/loading.py
