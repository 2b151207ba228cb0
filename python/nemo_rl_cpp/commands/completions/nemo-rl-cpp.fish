# Completion of nemo-rl-cpp for fish, which quotes what it inserts itself and hands the begun word over as it was typed.
function __nemo_rl_cpp
  set -l current (commandline -ct | string replace -r "^['\"]" "" | string unescape)
  nemo-rl-cpp completion --words (commandline -opc) "|$current" 2>/dev/null
end
complete -c nemo-rl-cpp -f -a '(__nemo_rl_cpp)'
