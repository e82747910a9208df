"""When what serves is begun again after a fault, and when it is given up.

How long it had served flows in, how long to wait flows out. The invariant: faults in a row are
answered with waits that double, and `TRIES` of them are the end.
"""

from dataclasses import dataclass

FIRST_WAIT, TRIES = 0.25, 4  # seconds before it serves again, doubling; faults in a row that end it
STEADY_SECONDS = 60.0  # of service, after which a fault is the first one in a row


@dataclass
class Faults:
    """Those in a row so far."""

    row: int = 0

    def wait(self, served: float) -> float | None:
        """Seconds to wait after a fault that ended `served` seconds of service; None: no more."""
        self.row = 1 if served > STEADY_SECONDS else self.row + 1
        return None if self.row >= TRIES else FIRST_WAIT * 2 ** (self.row - 1)

    def __str__(self) -> str:
        return f"fault {self.row} of {TRIES} in a row"
