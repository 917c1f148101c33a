"""What a run is planned to be, and what a promise asks of its noise."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedRun:
    """All of a run that a promise over the whole of it depends on; public."""

    records: int  # of a client
    batch_size: int | None  # None: all of them at once
    epochs: int  # local, of a round
    rounds: int
    participations: int  # the most rounds that one client takes part in
    cohort: int  # clients of a round
    lost: float = 0.0  # share of a cohort that may drop out or work with the server

    @property
    def steps(self) -> int:
        """Local steps of a round."""
        return self.epochs * -(-self.records // min(self.batch_size or self.records, self.records))
