// The exit status of a process that code in it ends in the middle of the work.
#pragma once

namespace nemo_rl::process {

/// While set, the C library's exit(0) in this process says so and leaves with status 1: a run that was broken off must
/// not look like a good one. Forked children may leave as they like.
void set_unfinished(bool unfinished);

}  // namespace nemo_rl::process
