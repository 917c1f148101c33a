"""A ready Flower app: name ``gradveil.flower:server_app`` and ``gradveil.flower:client_app`` as its components.

``flwr run examples/flower`` starts it in simulation or on a SuperLink; the run config holds the settings.
"""

from gradveil.integrations.flower.app import make_client_app, make_server_app

__all__ = ["client_app", "server_app"]

client_app = make_client_app()
server_app = make_server_app()
