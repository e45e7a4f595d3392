"""Progress display of a running experiment in the terminal."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from recipes.executors import ProgressCallback
from recipes.nodes import Node

console = Console()


class View:
    """Progress bars of the nodes that run in parallel; with live=False only a line per node."""

    def __init__(self, total: int, live: bool):
        self.total, self.live = total, live
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not live,
        )
        self.tasks: dict[Node, TaskID] = {}

    def __enter__(self) -> "View":
        self.progress.start()
        self.all = self.progress.add_task("all parts", total=self.total, status="")
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def print(self, text: str) -> None:
        """Print a line above the progress bars."""
        self.progress.console.print(text)

    def start(self, node: Node) -> None:
        """Print the node's title and add its progress bar."""
        self.print(f"[bold]{node.title}")
        self.tasks[node] = self.progress.add_task(
            f"seed {node.seed}: {node.name}", total=None, status=""
        )

    def progress_callback(self, node: Node) -> ProgressCallback:
        """A function that shows a text on a node's progress."""
        return lambda text: self.progress.update(self.tasks[node], status=text)

    def end(self, node: Node) -> None:
        """Remove the progress bar of a node that has ended."""
        self.progress.remove_task(self.tasks.pop(node))

    def advance(self, count: int = 1) -> None:
        """Count that many nodes as finished."""
        self.progress.advance(self.all, count)
