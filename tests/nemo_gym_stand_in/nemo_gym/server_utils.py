from dataclasses import dataclass

HEAD_SERVER_KEY_NAME = "head_server"


@dataclass
class BaseServerConfig:
    host: str
    port: int
