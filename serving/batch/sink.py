# SPDX-License-Identifier: Apache-2.0
"""Where finished lines go: straight to the output, or held in a journal until their place has come."""

from pathlib import Path

from serving.batch.done import DoneLines
from serving.batch.files import publish, told
from serving.batch.formats import Target
from serving.batch.jsonl import JsonlFile

# A journal above this is cut back to what it still has to hold.
COMPACT_BYTES = 16 << 20


class DirectSink:
    """Lines in the order in which they finish."""

    def __init__(self, target: Target):
        self.done = DoneLines()
        self._target = target
        for line in target.recover():
            self.done.add(line)

    def put(self, line: int, text: bytes) -> None:
        """Writes an output line. Raises `BatchError` and leaves what is there whole."""
        self._target.append([text])
        self.done.add(line)

    def skip(self, line: int) -> None:
        """Passes over an input line that gets no output."""
        self.done.add(line)

    def sync(self) -> None:
        """Waits until the disk holds all."""
        self._target.sync()

    def close(self, complete: bool) -> None:
        """Ends the writing; `complete` says that nothing more will ever come."""
        self._target.sync()
        self._target.close()


class SplitSink:
    """Lines as they finish, in two outputs: one for those that were `answered`, one for those that were not."""

    def __init__(self, answered: Target, refused: Target):
        self.done = DoneLines()
        self._targets = {True: answered, False: refused}
        self.counts = {True: 0, False: 0}
        for is_answer, target in self._targets.items():
            for line in target.recover():
                self.counts[is_answer] += self.done.add(line)

    def put(self, line: int, text: bytes, is_answer: bool) -> None:
        """Writes an output line. Raises `BatchError` and leaves what is there whole."""
        self._targets[is_answer].append([text])
        self.done.add(line)
        self.counts[is_answer] += 1

    def skip(self, line: int) -> None:
        """Passes over an input line that gets no output."""
        self.done.add(line)

    def sync(self) -> None:
        """Waits until the disk holds all."""
        for target in self._targets.values():
            target.sync()

    def close(self) -> None:
        """Ends the writing."""
        for target in self._targets.values():
            target.close()


class HeldSink:
    """Lines that wait in a journal: for those before them if `ordered`, and for the target's `min_rows`.

    A line is on disk as soon as it is put, so a kill loses nothing; memory holds offsets only. A line that a kill left
    in both files is dropped from the journal, the target having it for good.
    """

    def __init__(self, target: Target, journal: Path, ordered: bool, compact_bytes: int = COMPACT_BYTES):
        self.done = DoneLines()
        self._target, self._path, self._ordered, self._compact_bytes = target, journal, ordered, compact_bytes
        self._places: dict[int, tuple[int, int]] = {}
        self._ready: list[int] = []
        self._released = 1
        for line in target.recover():
            self.done.add(line)
        self._journal = JsonlFile(journal)
        for line, offset, length in self._journal.places():
            if self.done.add(line):
                self._places[line] = (offset, length)
                if not ordered:
                    self._ready.append(line)
        self._release()

    def put(self, line: int, text: bytes) -> None:
        """Writes an output line to the journal and passes on what is ready. Raises `BatchError`; nothing is lost."""
        offset = self._journal.size
        self._journal.append([text])
        self._places[line] = (offset, len(text))
        self.done.add(line)
        if not self._ordered:
            self._ready.append(line)
        self._release()

    def skip(self, line: int) -> None:
        """Passes over an input line that gets no output."""
        self.done.add(line)
        self._release()

    def sync(self) -> None:
        """Waits until the disk holds all."""
        self._target.sync()
        self._journal.sync()

    def close(self, complete: bool) -> None:
        """Ends the writing; if `complete`, what still waits is passed on."""
        if complete:
            self._pass_on()
            assert not self._places, "lines wait for others that will not come"
            self._target.sync()
            self._journal.truncate(0)
        self.sync()
        self._target.close()
        self._journal.close()

    def _release(self) -> None:
        if self._ordered and self.done.floor > self._released:
            self._ready.extend(line for line in range(self._released, self.done.floor) if line in self._places)
            self._released = self.done.floor
        if len(self._ready) >= self._target.min_rows:
            self._pass_on()

    def _pass_on(self) -> None:
        if not self._ready:
            return
        self._target.append([self._journal.read(*self._places[line]) for line in self._ready])
        for line in self._ready:
            del self._places[line]
        self._ready.clear()
        if self._journal.size > self._compact_bytes:
            self._compact()

    def _compact(self) -> None:
        # What the journal drops must be safe in the target first.
        self._target.sync()
        if not self._places:
            self._journal.truncate(0)
            return
        beside = self._path.with_suffix(".tmp")
        with told("journal", self._path, "make room and run the command again, what is answered stays"):
            beside.unlink(missing_ok=True)
            shorter, places = JsonlFile(beside), {}
            for line, place in self._places.items():
                places[line] = (shorter.size, place[1])
                shorter.append([self._journal.read(*place)])
            shorter.sync()
            publish(beside, self._path)
        self._journal.close()
        self._journal, self._places = shorter, places
