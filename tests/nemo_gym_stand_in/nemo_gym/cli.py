import os
from dataclasses import dataclass


@dataclass
class GlobalConfigDictParserConfig:
    initial_global_config_dict: dict
    skip_load_from_cli: bool


class RunHelper:
    config: dict = {}

    def start(self, global_config_dict_parser_config):
        RunHelper.config.update(global_config_dict_parser_config.initial_global_config_dict)
        print("servers print to the log, not between the answers")
        if "no_such_server" in RunHelper.config["config_paths"]:
            raise FileNotFoundError("no_such_server")

    def shutdown(self):
        with open(os.environ["NEMO_GYM_STAND_IN_ENDED"], "a", encoding="utf-8") as file:
            file.write("ended\n")
