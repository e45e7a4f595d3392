import cpu_torchvision  # noqa: F401  (first: see its docstring)
