// Turns the C++ blocks of pages into one file of functions: skill_fragments OUTPUT PAGE...
// A block with a main() is a program that is built elsewhere. One that begins with a declaration goes into a namespace
// of its own, every other one into a function whose parameters are what the page presupposes: net, optimizer, x, y.

#include <iostream>
#include <set>

#include "docs/markdown.h"

namespace {

bool starts_with(const std::string& text, const std::string& start) { return text.rfind(start, 0) == 0; }

bool is_declaration(const std::string& text) {
  for (const char* start : {"struct ", "class ", "template ", "void ", "#include", "using "}) {
    if (starts_with(text, start)) return true;
  }
  return false;
}

std::string without_includes(const std::string& text, std::ostream& includes) {
  std::istringstream lines(text);
  std::string rest;
  for (std::string line; std::getline(lines, line);) {
    if (starts_with(line, "#include")) includes << line << '\n';
    rest += (starts_with(line, "#include") ? "" : line) + '\n';
  }
  return rest;
}

}  // namespace

int main(int argc, char** argv) {
  std::set<std::string> seen;  // languages share their blocks
  std::ostringstream includes, functions, table;
  for (int i = 2; i < argc; ++i) {
    for (const markdown::Block& block : markdown::read(argv[i]).blocks) {
      if (block.language != "cpp" || block.text.find("int main(") != std::string::npos) continue;
      if (!seen.insert(block.text).second) continue;
      const std::string body = without_includes(block.text, includes), name = "fragment_" + std::to_string(seen.size());
      functions << "#line " << block.line << " \"" << argv[i] << "\"\n";
      if (is_declaration(block.text)) {
        functions << "namespace " << name << " {\n" << body << "}\nusing namespace " << name << ";\n";
        continue;
      }
      functions << "static void " << name
                << "([[maybe_unused]] Net& net, [[maybe_unused]] torch::optim::AdamW& optimizer,\n"
                   "[[maybe_unused]] torch::Tensor x, [[maybe_unused]] torch::Tensor y) {{\n"
                << "#line " << block.line << " \"" << argv[i] << "\"\n"
                << body << "}}\n";
      const bool joins = block.text.find("init_process_group(") != std::string::npos;
      table << "  {\"" << argv[i] << "\", " << block.line << ", " << (joins ? "true" : "false") << ", " << name
            << "},\n";
    }
  }
  std::ofstream out(argv[1]);
  out << includes.str() << functions.str() << "static const Fragment kFragments[] = {\n" << table.str() << "};\n";
  return out ? 0 : 1;
}
