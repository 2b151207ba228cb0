#include "config/yaml_tree.h"

#include <yaml-cpp/yaml.h>
