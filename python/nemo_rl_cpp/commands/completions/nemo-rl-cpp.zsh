#compdef nemo-rl-cpp
# Completion of nemo-rl-cpp for zsh, which quotes what it inserts itself.
_nemo_rl_cpp() {
  local -a found
  found=("${(@f)$(nemo-rl-cpp completion --words ${(Q)words[1,CURRENT-1]} ${(Q)PREFIX} "|${(Q)PREFIX}" 2>/dev/null)}")
  found=(${found:#})
  local -a open=(${(M)found:#*[=/.]}) closed=(${found:#*[=/.]})
  (( $#open )) && compadd -S '' -- $open
  (( $#closed )) && compadd -- $closed
}
compdef _nemo_rl_cpp nemo-rl-cpp
