// labels: ranks
// timeout: 600
// needs: skill_program, fsdp2_program, reference_train
// The pages of skills/: every snippet runs, every error text is one that a program made, links lead somewhere, and the
// Japanese page is the English one in other words.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <set>

#include "docs/markdown.h"
#include "launcher/launch.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

const fs::path kRoot = fs::path(test_file("..")).lexically_normal();
const fs::path kSkill = kRoot / "skills/fsdp2-cpp";

std::vector<fs::path> pages(const fs::path& folder = kRoot / "skills") {
  std::vector<fs::path> found;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.path().extension() == ".md") found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

/// Links to files or headings that are not there, "page: link".
std::vector<std::string> broken_links(const std::vector<fs::path>& all) {
  std::vector<std::string> broken;
  for (const auto& page : all) {
    for (const std::string& link : markdown::read(page).links) {
      const size_t hash = std::min(link.find('#'), link.size());
      const std::string file = link.substr(0, hash);
      const fs::path target = file.empty() ? page : (page.parent_path() / file).lexically_normal();
      bool found = fs::exists(target);
      if (found && hash < link.size()) {
        const auto headings = markdown::read(target).headings;
        found = std::any_of(headings.begin(), headings.end(), [&](const auto& heading) {
          return markdown::anchor(heading.second) == link.substr(hash + 1);
        });
      }
      if (!found) broken.push_back(page.string() + ": " + link);
    }
  }
  return broken;
}

std::string bin(const std::string& program) { return build_folder() + "/bin/" + program; }
std::string skill_program() { return build_folder() + "/tests/skill_program"; }

/// `command` in `folder`, as somebody would type it who has the programs on PATH and calls his own ./train.
ProcessResult run_shell(const std::string& folder, const std::string& command, std::chrono::seconds timeout = 240s) {
  const char* path = std::getenv("PATH");
  return run_process({"sh", "-ec", "cd " + folder + "\n" + command},
                     {"OMP_NUM_THREADS=1", "PATH=" + build_folder() + "/bin:" + (path ? path : "/usr/bin:/bin")},
                     timeout);
}

// ----- snippets ----------------------------------------------------------------------------------------------------

TEST(Skill, EveryCppFragmentRunsOnTwoRanks) {
  const TempDir folder;
  const auto ran = run_shell(folder.path(), "fsdp2 run --nproc-per-node 2 " + skill_program() + " fragments", 300s);
  EXPECT_EQ(ran.exit_code, 0) << ran.output;
  std::set<std::string> blocks;
  for (const auto& page : pages()) {
    for (const auto& block : markdown::read(page).blocks) {
      if (block.language != "cpp" || !blocks.insert(block.text).second) continue;
      // Declarations and whole programs have no line of their own; they are compiled, and used by fragments.
      if (std::regex_search(block.text, std::regex("^(struct|void|class|using|#include|//)"))) continue;
      EXPECT_NE(ran.output.find("ran " + page.string() + ":" + std::to_string(block.line)), std::string::npos)
          << page << ":" << block.line;
    }
  }
  EXPECT_GT(blocks.size(), 25u);
}

TEST(Skill, TheReferenceProgramIsTheExample) {
  const std::string example = read_file(kRoot / "examples/reference/train.cpp");
  for (const char* name : {"SKILL.md", "SKILL.ja.md"}) {
    const auto blocks = markdown::read(kSkill / name).blocks;
    EXPECT_TRUE(std::any_of(blocks.begin(), blocks.end(), [&](const auto& block) { return block.text == example; }))
        << name;
  }
  for (const char* label : {"init_distributed", "build_model_meta", "build_optimizer", "train_step", "checkpoint_save",
                            "checkpoint_load"}) {
    EXPECT_NE(example.find(std::string("// ----- ") + label + " ---"), std::string::npos) << label;
  }
}

TEST(Skill, EveryShellBlockRunsInsideAProjectWithTheCMakeBlock) {
  const TempDir folder;
  const std::string prefix = folder.path() + "/prefix", project = folder.path() + "/project";
  ASSERT_EQ(run_process({"cmake", "--install", build_folder(), "--prefix", prefix}).exit_code, 0);
  fs::create_directories(project);
  std::ofstream(project + "/train.cpp") << "#include <fsdp2/version.h>\nint main() { return FSDP2_VERSION_MAJOR; }\n";
  fs::copy_file(bin("reference_train"), project + "/train");
  int count = 0;
  for (const auto& page : pages()) {
    if (page.filename() == "SKILL.ja.md") continue;  // has the same blocks
    for (const auto& block : markdown::read(page).blocks) {
      if (block.language == "cmake") std::ofstream(project + "/CMakeLists.txt") << block.text;
      if (block.language != "sh") continue;
      const auto ran = run_shell(project, "export FSDP2_PREFIX=" + prefix + "\n" + block.text);
      EXPECT_EQ(ran.exit_code, 0) << page << ":" << block.line << "\n" << ran.output;
      ++count;
    }
  }
  EXPECT_GE(count, 5);
  EXPECT_EQ(broken_links(pages(prefix + "/share/fsdp2/skills")), std::vector<std::string>());  // as installed
}

// ----- error texts -------------------------------------------------------------------------------------------------

std::string one_line(std::string text) {
  text = std::regex_replace(text, std::regex("\\s+"), " ");
  return text.substr(0, text.find_last_not_of(' ') + 1);
}

/// Whether the parts of `listed` between "..." stand in `said`, in this order.
bool matches(const std::string& listed, const std::string& said) {
  size_t at = 0;
  for (size_t begin = 0; begin <= listed.size();) {
    const size_t end = std::min(listed.find("...", begin), listed.size());
    const std::string part = one_line(listed.substr(begin, end - begin));
    const size_t found = said.find(part.substr(std::min(part.find_first_not_of(' '), part.size())), at);
    if (found == std::string::npos) return false;
    at = found + part.size();
    begin = end + 3;
  }
  return true;
}

bool is_error_text(const std::string& text) {
  return std::regex_search(text, std::regex("^(\\[[a-z_]+\\] |\\.\\.\\. .*[a-z]{4})"));
}

std::vector<std::string> listed_errors(const markdown::Page& page) {
  std::vector<std::string> texts;
  for (const std::string& code : page.codes) {
    if (is_error_text(code)) texts.push_back(code);
  }
  for (const auto& block : page.blocks) {
    std::istringstream lines(block.text);
    for (std::string line; block.language == "text" && std::getline(lines, line);) {
      if (is_error_text(line)) texts.push_back(line);
    }
  }
  return texts;
}

TEST(Skill, EveryErrorTextIsOneThatAProgramMade) {
  const TempDir folder;
  const auto ran = run_shell(folder.path(), "fsdp2 run --nproc-per-node 2 " + skill_program() + " faults said", 300s);
  ASSERT_EQ(ran.exit_code, 0) << ran.output;
  std::vector<std::string> said;
  std::istringstream lines(read_file(folder.path() + "/said"));
  for (std::string line; std::getline(lines, line);) {
    EXPECT_EQ(line.find(": no error"), std::string::npos) << line;
    said.push_back(one_line(line));
  }
  const std::string unset = "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT\n";
  said.push_back(one_line(run_shell(folder.path(), unset + skill_program() + " faults none").output));
  const std::string port = std::to_string(20000 + getpid() % 20000);
  said.push_back(one_line(run_shell(folder.path(), unset + skill_program() + " alone " + port).output));

  size_t count = 0;
  for (const auto& page : pages()) {
    for (const std::string& listed : listed_errors(markdown::read(page))) {
      EXPECT_TRUE(std::any_of(said.begin(), said.end(), [&](const auto& text) { return matches(listed, text); }))
          << page << " lists an error that no program made: " << listed;
      ++count;
    }
  }
  EXPECT_GT(count, 90u);
}

TEST(Skill, ATextThatNoProgramMakesIsSeen) {
  EXPECT_TRUE(matches("[a] parameters ... are on meta; ...", "[rank 0] [a] parameters x, y are on meta; call f"));
  EXPECT_FALSE(matches("[a] parameters ... are on meta", "[rank 0] [a] parameters x are whole"));
  EXPECT_FALSE(matches("[a] b ... c ... d", "[a] b d c"));
  EXPECT_TRUE(is_error_text("[dcp] x"));
  EXPECT_FALSE(is_error_text("[1]"));
}

// ----- numbers -----------------------------------------------------------------------------------------------------

/// Cell `column` of the first row of the report that begins with `start`.
std::string report_cell(const std::string& start, int column) {
  static const std::string report = read_file(kRoot / "benchmarks/report.md");
  const size_t at = report.find("\n" + start);
  if (at == std::string::npos) return "(no row " + start + ")";
  std::istringstream cells(report.substr(at + 1, report.find('\n', at + 1) - at - 1));
  std::string cell;
  for (int i = 0; i <= column + 1; ++i) std::getline(cells, cell, '|');
  const std::string text = one_line(cell).substr(1);
  return text.substr(0, text.find(" ("));  // the median; of several repeats least and most follow
}

std::string in_ms(std::string us) {
  us.erase(std::remove(us.begin(), us.end(), ','), us.end());
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g", std::atof(us.c_str()) / 1000);
  return text;
}

TEST(Skill, BytesOfWholeParametersAreWhatIsCounted) {
  // By hand: float32 elements of embed and head, and of a block.
  const int64_t root = 4 * (128 * 32 + 128 + 128 + 1), block = 4 * (2 * 128 + 512 * 128 + 512 + 128 * 512 + 128);
  const TempDir folder;
  const auto expect_peaks = [&](const std::string& backend, int64_t group_per_block) {
    const auto ran = run_shell(folder.path(), "fsdp2 run --nproc-per-node 2 " + skill_program() + " peak " + backend);
    const std::string peaks = "peaks " + std::to_string(root + 4 * block) + " " + std::to_string(group_per_block);
    EXPECT_NE(ran.output.find(peaks), std::string::npos) << backend << ": " << ran.output;
  };
  expect_peaks("shm", root + block);
  expect_peaks("gloo", root + block);
  for (const char* name : {"SKILL.md", "SKILL.ja.md"}) {
    EXPECT_EQ(root + 4 * block, 2128900);
    EXPECT_NE(read_file(kSkill / name).find("2,128,900"), std::string::npos) << name;
    EXPECT_EQ(root + block, 545284);
    EXPECT_NE(read_file(kSkill / name).find("545,284"), std::string::npos) << name;
  }
}

TEST(Skill, MeasuredNumbersAreThoseOfTheReport) {
  const std::string sides[] = {"ours, shm", "ours, Gloo", "Python, Gloo"};
  std::vector<std::string> rows;
  const auto add = [&](const std::function<std::string(const std::string& side)>& cell) {
    rows.push_back("|");
    for (const std::string& side : sides) rows.back() += " " + cell(side) + " |";
  };
  for (const std::string model : {"tiny", "small", "medium", "comm"}) {
    add([&](const auto& side) { return report_cell("| " + model + " | " + side + " | fsdp2 ", 5); });
  }
  add([](const auto& side) { return report_cell("| 2 ranks | " + side + " | 8 | its own ", 4) + " us"; });
  add([](const auto& side) { return report_cell("| 2 ranks | 1e3 | " + side, 3) + " us"; });
  add([](const auto& side) { return in_ms(report_cell("| 2 ranks | 1e8 | " + side, 3)) + " ms"; });
  add([](const auto& side) {  // the table of memory has the side first
    return report_cell("| " + side + " | ", 1) + " MiB";
  });
  for (const char* name : {"SKILL.md", "SKILL.ja.md"}) {
    for (const std::string& row : rows) {
      EXPECT_NE(read_file(kSkill / name).find(row), std::string::npos)
          << name << ", step 3: benchmarks/report.md says now " << row;
    }
  }
  const std::string async = "| DCP async save blocks / memcpy, 2 ranks in memory";
  for (const int column : {2, 4}) {
    EXPECT_NE(read_file(kSkill / "references/dcp_async.md").find(report_cell(async, column)), std::string::npos);
  }
}

// ----- links and languages -----------------------------------------------------------------------------------------

TEST(Skill, LinksLeadSomewhere) {
  EXPECT_EQ(broken_links(pages()), std::vector<std::string>());
  size_t count = 0;
  for (const auto& page : pages()) count += markdown::read(page).links.size();
  EXPECT_GT(count, 60u);
}

TEST(Skill, TheJapanesePageHasTheStructureOfTheEnglishOne) {
  const auto english = markdown::read(kSkill / "SKILL.md"), japanese = markdown::read(kSkill / "SKILL.ja.md");
  ASSERT_EQ(japanese.headings.size(), english.headings.size());
  for (size_t i = 0; i < english.headings.size(); ++i) {
    EXPECT_EQ(japanese.headings[i].first, english.headings[i].first) << japanese.headings[i].second;
  }
  ASSERT_EQ(japanese.blocks.size(), english.blocks.size());
  for (size_t i = 0; i < english.blocks.size(); ++i) {
    EXPECT_EQ(japanese.blocks[i].text, english.blocks[i].text) << "SKILL.ja.md:" << japanese.blocks[i].line;
    EXPECT_EQ(japanese.blocks[i].language, english.blocks[i].language);
  }
  EXPECT_EQ(japanese.links.size(), english.links.size());
  EXPECT_EQ(listed_errors(japanese), listed_errors(english));
  const auto tasks = [](const char* name) {
    const std::string text = read_file(kSkill / name);
    const std::regex box("\n- \\[ \\] \\*\\*[0-9]+\\.");
    return std::distance(std::sregex_iterator(text.begin(), text.end(), box), std::sregex_iterator());
  };
  EXPECT_EQ(tasks("SKILL.ja.md"), tasks("SKILL.md"));
}

TEST(Skill, TheFrontMatterNamesTheSkillAndSaysWhenToUseIt) {
  for (const char* name : {"SKILL.md", "SKILL.ja.md"}) {
    const std::string text = read_file(kSkill / name);
    EXPECT_TRUE(std::regex_search(text, std::regex("^---\nname: fsdp2-cpp\ndescription: [^\n]{80,1024}\n---\n")))
        << name;
  }
}

}  // namespace
}  // namespace fsdp2::testing
