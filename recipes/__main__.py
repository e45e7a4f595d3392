"""`python -m recipes`: see recipes/cli.py."""

from recipes.cli import main
from recipes.messages import console

if __name__ == "__main__":
    console(main, "the same command with --ckpt_path …/last.ckpt continues")
