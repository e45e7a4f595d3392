"""`python -m recipes`: see recipes/cli.py."""

from recipes.cli import main

main()
