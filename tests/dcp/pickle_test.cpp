// The pickle machine against streams written by hand: what is legal, what is hostile.

#include <fsdp2/error.h>

#include "pickle/reader.h"
#include "pickle/writer.h"
#include "support/ranks.h"

namespace fsdp2::pickle {
namespace {

Graph read(const std::string& input) { return pickle::read(input, "test"); }

std::string bytes(std::initializer_list<int> codes) {
  std::string result;
  for (int code : codes) result.push_back(static_cast<char>(code));
  return result;
}

TEST(Pickle, ReadsNumbersOfEveryForm) {
  const struct {
    std::string input;
    int64_t value;
  } cases[] = {
      {"K\xff", 255},
      {bytes({'M', 0x34, 0x12}), 0x1234},
      {bytes({'J', 0xfe, 0xff, 0xff, 0xff}), -2},
      {bytes({0x8a, 0}), 0},
      {bytes({0x8a, 1, 0xff}), -1},
      {bytes({0x8a, 2, 0xff, 0x00}), 255},
      {bytes({0x8a, 5, 0, 0, 0, 0, 1}), int64_t{1} << 32},
      {bytes({0x8b, 1, 0, 0, 0, 0x80}), -128},
  };
  for (const auto& example : cases) {
    const std::string input = "\x80\x02" + example.input + ".";
    const Graph graph = read(input);
    EXPECT_EQ(graph.integer(graph.root()), example.value);
  }
  const std::string real = "\x80\x02G" + bytes({0x40, 0x04, 0, 0, 0, 0, 0, 0}) + ".";
  const Graph graph = read(real);
  EXPECT_EQ(graph.real(graph.root()), 2.5);
}

TEST(Pickle, WriterAndReaderAgree) {
  Writer out;
  out.mark();
  out.integer(-5000000000);
  out.real(1.5);
  out.text(std::string("a\0b", 3));
  out.bytes("\xff\x00");
  out.torch_size(std::vector<int64_t>{2, 300, 70000});
  out.global("torch", "Size");
  out.tuple();
  const std::string pickle = std::move(out).finish();
  const Graph graph = read(pickle);
  ASSERT_EQ(graph.count(graph.root()), 6u);
  const Ref* item = graph.begin(graph.root());
  EXPECT_EQ(graph.integer(item[0]), -5000000000);
  EXPECT_EQ(graph.text(item[2]), std::string_view("a\0b", 3));
  EXPECT_EQ(graph.callee(item[3]).name, "encode");
  EXPECT_EQ(graph.callee(item[4]).name, "Size");
  EXPECT_EQ(graph.global(item[5]), (Graph::Name{"torch", "Size"}));
}

TEST(Pickle, BatchesAndSharedObjects) {
  // {'a': [1], 'b': <the same list>}, filled in two batches, with FRAME and MEMOIZE.
  const std::string input = bytes({0x80, 4,   0x95, 19,   0,   0, 0,   0,   0,    0, 0,   '}', 0x94, '(', 0x8c,
                                   1,    'a', ']',  0x94, 'K', 1, 'a', 'u', 0x8c, 1, 'b', 'h', 1,    's', '.'});
  const Graph graph = read(input);
  ASSERT_EQ(graph.count(graph.root()), 4u);
  EXPECT_EQ(graph.begin(graph.root())[1], graph.begin(graph.root())[3]);
  EXPECT_EQ(graph.count(graph.begin(graph.root())[1]), 1u);
}

TEST(Pickle, MalformedStreamsAreErrors) {
  const std::string cases[] = {
      "",
      ".",                         // nothing on the stack
      "\x80\x02NN.",               // too much on the stack
      "\x80\x02N",                 // no end
      bytes({0x80, 6, 'N', '.'}),  // unknown protocol
      bytes({0x80, 1, 'N', '.'}),
      bytes({0x80, 2, 'h', 0, '.'}),                            // memo never set
      bytes({0x80, 2, 'N', 'r', 0xff, 0xff, 0xff, 0xff, '.'}),  // memo of 4 billion
      bytes({0x80, 2, 'X', 0xff, 0xff, 0xff, 0x7f, 'a', '.'}),  // longer than the file
      bytes({0x80, 4, 0x8d, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 'a', '.'}),
      bytes({0x80, 4, 0x95, 0xff, 0, 0, 0, 0, 0, 0, 0, 'N', '.'}),  // frame longer than the file
      "\x80\x02t.",                                                 // no mark
      "\x80\x02K\x01(K\x02.",                                       // a mark that stays
      "\x80\x02(\x85.",                                             // takes from below the mark
      "\x80\x02]K\x01K\x02s.",                                      // sets a key of a list
      "\x80\x02}(K\x01u.",                                          // a key without a value
      "\x80\x02K\x01K\x02"
      "a.",                             // appends to a number
      "\x80\x02K\x01}b.",               // state of a number
      "\x80\x02ctorch\nSize",           // global without an end
      "\x80\x02ctorch\nSize\nK\x01R.",  // call with a number
      "\x80\x04K\x01K\x02\x93.",        // global named by numbers
  };
  for (const std::string& input : cases) {
    EXPECT_FSDP2_ERROR(read(input), kCorruption, "[pickle] test");
  }
  for (const std::string& input : {std::string("\x80\x02I1\n."),
                                   std::string("\x80\x02K\x01"
                                               "2."),
                                   std::string("\x80\x02Pid\n.")}) {
    EXPECT_FSDP2_ERROR(read(input), kUnsupported, "opcode");
  }
}

TEST(Pickle, GlobalsOutsideOfTheListAreRefusedByName) {
  ReadOptions options;
  options.allow_global = [](std::string_view module, std::string_view) { return module == "torch"; };
  const std::string attack =
      "\x80\x02"
      "cposix\nsystem\nX" +
      bytes({4, 0, 0, 0}) + "true\x85R.";
  EXPECT_FSDP2_ERROR(pickle::read(attack, "test", options), kUnsupported, "posix.system");
  // Without a list it is read, as words only.
  const Graph graph = read(attack);
  EXPECT_EQ(graph.callee(graph.root()), (Graph::Name{"posix", "system"}));
}

TEST(Pickle, DeepNestingNeedsNoStackAndCountsAreBounded) {
  const size_t depth = 300000;
  const std::string deep = "\x80\x02" + std::string(depth, ']') + std::string(depth - 1, 'a') + ".";
  const Graph graph = read(deep);
  EXPECT_EQ(graph.size(), depth);
  ReadOptions options;
  options.max_nodes = 1000;
  EXPECT_FSDP2_ERROR(pickle::read(deep, "test", options), kCorruption, "more than 1000 objects");
}

TEST(Pickle, EveryTruncationOfALegalPickleIsAnError) {
  Writer out;
  out.empty_dict();
  out.mark();
  out.text("sizes");
  out.torch_size(std::vector<int64_t>{2, 3});
  out.text("data");
  out.bytes("\x80\x81");
  out.set_items();
  const std::string pickle = std::move(out).finish();
  for (size_t length = 0; length < pickle.size(); ++length) {
    const std::string cut = pickle.substr(0, length);
    EXPECT_FSDP2_ERROR(read(cut), kCorruption, "[pickle] test");
  }
}

}  // namespace
}  // namespace fsdp2::pickle
