"""FedAvg: clients, server, rounds."""
