"""Commands of the studies: reproduce, leaderboard, play."""
