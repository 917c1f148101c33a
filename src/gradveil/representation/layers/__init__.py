"""A network as the linear maps it comes to: one recorder and one table of rules for all who read layers."""
