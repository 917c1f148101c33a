"""Studies made with gradveil: the paper's tables and figures, the leaderboard, the playground."""
