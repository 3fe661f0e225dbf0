#pragma once

// What the tests need of a page in Markdown: fenced blocks, headings, inline code, links.

#include <algorithm>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace markdown {

struct Block {
  std::string language, text;
  int line = 0;  // of its first line, counted from 1
};
struct Page {
  std::vector<Block> blocks;
  std::vector<std::pair<int, std::string>> headings;  // level, text
  std::vector<std::string> codes;                     // inline
  std::vector<std::string> links;                     // targets
};

/// The anchor that a heading has on a page: lower case, spaces to hyphens, without punctuation.
inline std::string anchor(const std::string& heading) {
  std::string result;
  for (const char c : heading) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) || c == '_' || c == '-' || byte >= 0x80) result += static_cast<char>(std::tolower(byte));
    if (c == ' ') result += '-';
  }
  // The punctuation that Japanese headings use.
  for (const char* mark : {"：", "、", "。", "（", "）", "「", "」", "・", "？"}) {
    for (size_t at; (at = result.find(mark)) != std::string::npos;) result.erase(at, std::string(mark).size());
  }
  return result;
}

inline Page parse(const std::string& text) {
  Page page;
  const std::regex heading("(#+) +(.*)"), code("`([^`]+)`"), link(R"(\]\(([^)]+)\))");
  std::istringstream lines(text);
  bool inside = false;
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.rfind("```", 0) == 0) {
      inside = !inside;
      if (inside) page.blocks.push_back({line.substr(3), "", number + 1});
      continue;
    }
    if (inside) {
      page.blocks.back().text += line + '\n';
      continue;
    }
    std::smatch match;
    if (std::regex_match(line, match, heading)) page.headings.emplace_back(match[1].length(), match[2]);
    for (std::sregex_iterator it(line.begin(), line.end(), code), end; it != end; ++it) page.codes.push_back((*it)[1]);
    const std::string plain = std::regex_replace(line, code, "");
    for (std::sregex_iterator it(plain.begin(), plain.end(), link), end; it != end; ++it)
      page.links.push_back((*it)[1]);
  }
  return page;
}

inline Page read(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return parse(text.str());
}

}  // namespace markdown
