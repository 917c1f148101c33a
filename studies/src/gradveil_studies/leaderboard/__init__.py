"""The leaderboard: every defence under its strongest server, over the whole run, beside what it costs."""
