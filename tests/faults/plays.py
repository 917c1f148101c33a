"""The commands that are drilled."""

SMALL = ("--model", "logistic", "--clients", "2")
TRAIN = ("train", "--rounds", "4", "--partition", "iid:devices=4", *SMALL, "--engine")
COMMANDS: dict[str, tuple[str, ...]] = {
    "train sequential": (*TRAIN, "sequential"),
    "train vectorised": (*TRAIN, "vectorised"),
    "train processes": (*TRAIN, "processes:workers=2"),
    "audit": ("audit", "--rounds", "1", "--images", "1", "--attack", "analytic", "--defense", "none", *SMALL),
    "reproduce": ("reproduce", "sums", "--jobs", "1"),
    "reproduce --jobs 2": ("reproduce", "sums", "--jobs", "2"),
    "leaderboard": ("leaderboard", "--only", "time/*", "--defense", "gaussian:scale=0.001", "--jobs", "1"),
}
