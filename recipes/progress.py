"""The terminal's view of a running experiment."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from recipes.executors import ShowProgress
from recipes.nodes import Node

console = Console()


class View:
    """One live view of nodes that run side by side; without `live`, one line for each node."""

    def __init__(self, total: int, live: bool):
        self.total, self.live = total, live
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[progress]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not live,
        )
        self.tasks: dict[Node, TaskID] = {}

    def __enter__(self) -> "View":
        self.progress.start()
        self.all = self.progress.add_task("all parts", total=self.total, progress="")
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def print(self, text: str) -> None:
        """A line above the view."""
        self.progress.console.print(text)

    def start(self, node: Node) -> None:
        """A node begins."""
        self.print(f"[bold]{node.title}")
        self.tasks[node] = self.progress.add_task(
            f"seed {node.seed}: {node.name}", total=None, progress=""
        )

    def progress_of(self, node: Node) -> ShowProgress:
        """A function that shows a node's progress."""
        return lambda words: self.progress.update(self.tasks[node], progress=words)

    def end(self, node: Node) -> None:
        """A node has ended."""
        self.progress.remove_task(self.tasks.pop(node))

    def advance(self, count: int = 1) -> None:
        """Count that many nodes as finished."""
        self.progress.advance(self.all, count)
