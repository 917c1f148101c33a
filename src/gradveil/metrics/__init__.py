"""How close a reconstruction comes; one value per example."""
