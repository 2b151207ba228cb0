# Completion of nemo-rl-cpp for bash. Bash takes "=" and ":" for ends of words, and hands quotes over as they were typed: it gives the line
# up to the cursor and its own last word, which it replaces.
_nemo_rl_cpp() {
  local word found
  found=$(nemo-rl-cpp completion --words-bash "${COMP_LINE:0:COMP_POINT}" "|${COMP_WORDS[COMP_CWORD]}" 2>/dev/null) || return
  COMPREPLY=()
  while IFS= read -r word; do [ -n "$word" ] && COMPREPLY+=("$word"); done <<< "$found"
  case ${COMPREPLY[0]} in *=|*.|*/) compopt -o nospace 2>/dev/null ;; esac
}
complete -F _nemo_rl_cpp nemo-rl-cpp
