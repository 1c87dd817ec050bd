// Which ISA's kernel runs: the best the CPU has, unless LEVELHEAD_ISA or choose_isa names another.
#pragma once

#include <string>
#include <vector>

namespace levelhead {

std::vector<std::string> built_isas();      // compiled in, plainest first
std::vector<std::string> available_isas();  // of these, what the CPU and its system can run
std::string current_isa();                  // throws std::invalid_argument if LEVELHEAD_ISA names none of them

// Switches for the whole process (meant for tests); throws std::invalid_argument with the valid names.
void choose_isa(const std::string& name);

}  // namespace levelhead
