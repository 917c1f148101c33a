"""Who attacks what: servers of every tier, one attempt by each, probes of a defence, and the verdict."""
