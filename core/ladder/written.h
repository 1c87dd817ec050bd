// What the commands of this directory print and write: text, lists in JSON, and where and when it was measured.
#pragma once

#include <cstdio>
#include <ctime>
#include <fstream>
#include <string>

namespace levelhead::ladder {

template <class... Values>
std::string text(const char* format, Values... values) {
  char line[512];
  std::snprintf(line, sizeof line, format, values...);
  return line;
}

template <class Items, class Write>
std::string list(const Items& items, Write write) {
  std::string all;
  for (const auto& item : items) all += (all.empty() ? "" : ", ") + write(item);
  return "[" + all + "]";
}

inline std::string cpu() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "unknown";
}

inline std::string now() {
  const std::time_t time = std::time(nullptr);
  char words[32];
  std::strftime(words, sizeof words, "%Y-%m-%dT%H:%M:%S+00:00", std::gmtime(&time));
  return words;
}

}  // namespace levelhead::ladder
