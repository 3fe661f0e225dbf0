#include "pickle/reader.h"

#include <fsdp2/error.h>

#include <algorithm>
#include <cstring>
#include <limits>

namespace fsdp2::pickle {
namespace {

// Opcodes of the closed world, by the names that Python's pickletools prints.
enum Opcode : uint8_t {
  kMark = '(',
  kStop = '.',
  kNone = 'N',
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kLong1 = 0x8a,
  kLong4 = 0x8b,
  kBinFloat = 'G',
  kBinUnicode = 'X',
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kShortBinBytes = 'C',
  kBinBytes = 'B',
  kBinBytes8 = 0x8e,
  kByteArray8 = 0x96,
  kEmptyTuple = ')',
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kTuple = 't',
  kEmptyList = ']',
  kAppend = 'a',
  kAppends = 'e',
  kEmptyDict = '}',
  kSetItem = 's',
  kSetItems = 'u',
  kEmptySet = 0x8f,
  kAddItems = 0x90,
  kFrozenSet = 0x91,
  kGlobal = 'c',
  kStackGlobal = 0x93,
  kReduce = 'R',
  kNewObj = 0x81,
  kBuild = 'b',
  kBinPersId = 'Q',
  kMemoize = 0x94,
  kBinPut = 'q',
  kLongBinPut = 'r',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kProto = 0x80,
  kFrame = 0x95,
};

constexpr Ref kNothing = UINT32_MAX;
constexpr size_t kMaxInput = size_t{1} << 31;
constexpr size_t kMaxMarks = size_t{1} << 20;  // open at one time

}  // namespace

class Machine {
 public:
  Machine(std::string_view input, std::string_view what, const ReadOptions& options)
      : input_(input), what_(what), options_(options), max_nodes_(std::min(options.max_nodes, Graph::kMaxNodes)) {
    if (input.size() > kMaxInput) fail("is ", input.size(), " bytes long; at most ", kMaxInput, " are read");
    graph_.input_ = input;
    // What Python writes for metadata needs about that; pages that stay untouched cost nothing.
    graph_.nodes_.reserve(std::min(max_nodes_, input.size() / 8));
    graph_.elements_.reserve(input.size() / 4);
  }

  Graph run();

 private:
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    FSDP2_THROW(kCorruption, "[pickle] ", what_, ": byte ", position_, ": ", parts...);
  }

  // Input.
  std::string_view take(uint64_t count) {
    if (count > input_.size() - position_)
      fail("wants ", count, " more bytes; ", input_.size() - position_, " are left");
    const std::string_view result = input_.substr(position_, count);
    position_ += count;
    return result;
  }
  uint64_t little(size_t bytes) {
    uint64_t value = 0;
    std::memcpy(&value, take(bytes).data(), bytes);  // little-endian hosts only, as libtorch
    return value;
  }

  // Nodes and stack.
  Graph::Node& node(Ref ref) { return graph_.nodes_[ref]; }
  Type type(Ref ref) const { return graph_.type(ref); }
  Ref add(Type type, uint32_t extra, uint32_t first, uint32_t second) {
    if (graph_.nodes_.size() >= max_nodes_) fail("has more than ", max_nodes_, " objects");
    graph_.nodes_.push_back(Graph::Node{type, extra, first, second});
    return static_cast<Ref>(graph_.nodes_.size() - 1);
  }
  void push(Ref ref) { stack_.push_back(ref); }
  void push_integer(int64_t value) {
    constexpr int64_t kSmall = int64_t{1} << 29;
    if (value >= -kSmall && value < kSmall)
      return push(Graph::kImmediate | (static_cast<Ref>(value) & (Graph::kConstant - 1)));
    push_bits(Type::kInt, static_cast<uint64_t>(value));
  }
  void push_bits(Type type, uint64_t bits) {
    push(add(type, 0, static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)));
  }
  Ref add_text(Type type, std::string_view text) {
    return add(type, 0, static_cast<uint32_t>(text.data() - input_.data()), static_cast<uint32_t>(text.size()));
  }
  void push_container(Type type) { push(add(type, 0, 0, 0)); }
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  Ref pop() {
    if (stack_.size() <= floor()) fail("takes from an empty stack");
    const Ref top = stack_.back();
    stack_.pop_back();
    return top;
  }
  Ref top() {
    if (stack_.size() <= floor()) fail("looks at an empty stack");
    return stack_.back();
  }
  /// Pops the innermost mark; what lies above it is stack_[result..].
  size_t pop_mark() {
    if (marks_.empty()) fail("takes a mark where there is none");
    const size_t mark = marks_.back();
    marks_.pop_back();
    return mark;
  }
  void push_tuple(size_t count, Type type = Type::kTuple) {
    if (stack_.size() < floor() + count) fail("takes from an empty stack");
    if (count == 0 && type == Type::kTuple) return push(Graph::kEmptyTuple);
    const uint32_t first = reserve(count);
    graph_.elements_.insert(graph_.elements_.end(), stack_.end() - static_cast<ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    push(add(type, 0, first, static_cast<uint32_t>(count)));
  }
  /// Where the next element goes; there is room for `count`.
  uint32_t reserve(size_t count) const {
    constexpr size_t kMaxElements = std::numeric_limits<uint32_t>::max();
    if (count > kMaxElements - graph_.elements_.size()) fail("has more than ", kMaxElements, " elements");
    return static_cast<uint32_t>(graph_.elements_.size());
  }
  /// Moves stack_[mark..] into the collection below it.
  void extend(size_t mark, bool (*accepts)(Type), bool pairs) {
    if (mark <= floor()) fail("adds to a collection that is not there");
    const Ref target = stack_[mark - 1];
    if (!accepts(type(target))) fail("adds elements to a ", to_string(type(target)));
    const size_t count = stack_.size() - mark;
    if (pairs && count % 2 != 0) fail("sets a key without a value");
    Graph::Node& collection = node(target);
    auto& elements = graph_.elements_;
    const auto fresh = stack_.begin() + static_cast<ptrdiff_t>(mark);
    const size_t end = size_t{collection.first} + collection.second, room = collection.extra - collection.second;
    if (collection.extra != 0 && count <= room) {
      std::copy(fresh, stack_.end(), elements.begin() + static_cast<ptrdiff_t>(end));
    } else if (collection.extra == 0 && (collection.second == 0 || end == elements.size())) {
      const uint32_t first = reserve(count);
      if (collection.second == 0) collection.first = first;
      elements.insert(elements.end(), fresh, stack_.end());
    } else {
      move_collection(collection, collection.second + count);
      std::copy(fresh, stack_.end(), elements.begin() + collection.first + collection.second);
    }
    collection.second += static_cast<uint32_t>(count);
    stack_.resize(mark);
  }
  /// To the end of the elements, with room for twice as many as `needed`.
  void move_collection(Graph::Node& collection, size_t needed) {
    const size_t room = 2 * needed;
    if (room > Graph::kMaxNodes) fail("has a collection of ", needed, " elements");
    const uint32_t first = reserve(room);
    auto& elements = graph_.elements_;
    elements.resize(elements.size() + room, Graph::kNone);
    std::copy_n(elements.begin() + collection.first, collection.second, elements.begin() + first);
    collection.first = first;
    collection.extra = static_cast<uint32_t>(room);
  }

  void put(uint64_t index, Ref ref) {
    // Picklers number the memo from 0 on: a bigger number than there were bytes is an attack on
    // memory.
    if (index > position_) fail("memo number ", index, " is out of all proportion");
    if (index >= memo_.size()) memo_.resize(index + 1, kNothing);
    memo_[index] = ref;
  }
  void get(uint64_t index) {
    if (index >= memo_.size() || memo_[index] == kNothing) fail("memo number ", index, " was never set");
    push(memo_[index]);
  }

  void push_global(Ref module, Ref name);
  void read_global();
  void reduce();
  void build();
  void step(uint8_t opcode);

  std::string_view input_, what_;
  const ReadOptions& options_;
  size_t max_nodes_;
  size_t position_ = 0;
  Graph graph_;
  std::vector<Ref> stack_, memo_;
  std::vector<uint32_t> marks_;
  uint64_t memoized_ = 0;
};

void Machine::push_global(Ref module, Ref name) {
  const std::string_view module_text = graph_.text(module), name_text = graph_.text(name);
  if (options_.allow_global && !options_.allow_global(module_text, name_text)) {
    FSDP2_THROW(kUnsupported, "[pickle] ", what_, ": byte ", position_, ": refers to ", module_text.substr(0, 200), ".",
                name_text.substr(0, 200),
                ", which no checkpoint needs; nothing was imported or run; do not use a file from "
                "a source you do not trust");
  }
  push(add(Type::kGlobal, 0, module, name));
}

void Machine::read_global() {
  const auto line = [&] {
    const size_t end = input_.find('\n', position_);
    if (end == std::string_view::npos) fail("has a global name without an end");
    const std::string_view text = take(end - position_);
    take(1);
    return add_text(Type::kString, text);
  };
  const Ref module = line();
  push_global(module, line());
}

void Machine::reduce() {
  const Ref arguments = pop();
  const Ref callee = pop();
  if (type(arguments) != Type::kTuple) fail("calls with a ", to_string(type(arguments)), " for arguments");
  if ((callee & Graph::kImmediate) != 0) fail("calls a ", to_string(type(callee)));
  if (type(callee) == Type::kGlobal && graph_.count(arguments) == 0 &&
      graph_.global(callee) == Graph::Name{"collections", "OrderedDict"}) {
    return push_container(Type::kOrderedDict);
  }
  push(add(Type::kCall, callee, arguments, Graph::kNoState));
}

void Machine::build() {
  const Ref state = pop();
  const Ref target = top();
  if (type(target) == Type::kOrderedDict) return;  // attributes of a dict object (_metadata) carry no data
  if (type(target) != Type::kCall && type(target) != Type::kRecord)
    fail("sets the state of a ", to_string(type(target)));
  Graph::Node& object = node(target);
  if (object.second != Graph::kNoState) fail("sets the state of one object twice");
  object.second = state;
}

void Machine::step(uint8_t opcode) {
  const auto is_list = [](Type type) { return type == Type::kList; };
  const auto is_dict = [](Type type) { return type == Type::kDict || type == Type::kOrderedDict; };
  const auto is_set = [](Type type) { return type == Type::kSet; };
  switch (opcode) {
    case kProto: {
      const uint64_t protocol = little(1);
      if (protocol < 2 || protocol > 5) fail("is of protocol ", protocol, "; 2 to 5 are read");
      return;
    }
    case kFrame: {
      const uint64_t length = little(8);
      if (length > input_.size() - position_)
        fail("frame of ", length, " bytes; ", input_.size() - position_, " are left");
      return;
    }
    case kMark:
      if (marks_.size() >= kMaxMarks) fail("opens more than ", kMaxMarks, " collections at one time");
      return marks_.push_back(static_cast<uint32_t>(stack_.size()));
    case kNone:
      return push(Graph::kNone);
    case kNewTrue:
      return push(Graph::kTrue);
    case kNewFalse:
      return push(Graph::kFalse);
    case kBinInt:
      return push_integer(static_cast<int32_t>(little(4)));
    case kBinInt1:
      return push_integer(static_cast<int64_t>(little(1)));
    case kBinInt2:
      return push_integer(static_cast<int64_t>(little(2)));
    case kLong1:
    case kLong4: {
      std::string_view bytes = take(little(opcode == kLong1 ? 1 : 4));
      if (bytes.size() > 8) return push(add_text(Type::kLong, bytes));
      uint64_t value = !bytes.empty() && (bytes.back() & 0x80) ? ~uint64_t{0} : 0;
      std::memcpy(&value, bytes.data(), bytes.size());
      return push_integer(static_cast<int64_t>(value));
    }
    case kBinFloat:
      return push_bits(Type::kDouble, __builtin_bswap64(little(8)));
    case kShortBinUnicode:
      return push(add_text(Type::kString, take(little(1))));
    case kBinUnicode:
      return push(add_text(Type::kString, take(little(4))));
    case kBinUnicode8:
      return push(add_text(Type::kString, take(little(8))));
    case kShortBinBytes:
      return push(add_text(Type::kBytes, take(little(1))));
    case kBinBytes:
      return push(add_text(Type::kBytes, take(little(4))));
    case kBinBytes8:
      return push(add_text(Type::kBytes, take(little(8))));
    case kByteArray8:
      return push(add_text(Type::kByteArray, take(little(8))));
    case kEmptyTuple:
      return push_tuple(0);
    case kTuple1:
      return push_tuple(1);
    case kTuple2:
      return push_tuple(2);
    case kTuple3:
      return push_tuple(3);
    case kTuple:
      return push_tuple(stack_.size() - pop_mark());
    case kEmptyList:
      return push_container(Type::kList);
    case kEmptyDict:
      return push_container(Type::kDict);
    case kEmptySet:
      return push_container(Type::kSet);
    case kAppend:
      if (stack_.size() < floor() + 2) fail("takes from an empty stack");
      return extend(stack_.size() - 1, is_list, false);
    case kAppends:
      return extend(pop_mark(), is_list, false);
    case kSetItem:
      if (stack_.size() < floor() + 3) fail("takes from an empty stack");
      return extend(stack_.size() - 2, is_dict, true);
    case kSetItems:
      return extend(pop_mark(), is_dict, true);
    case kAddItems:
      return extend(pop_mark(), is_set, false);
    case kFrozenSet:
      return push_tuple(stack_.size() - pop_mark(), Type::kFrozenSet);
    case kGlobal:
      return read_global();
    case kStackGlobal: {
      const Ref name = pop();
      const Ref module = pop();
      if (type(name) != Type::kString || type(module) != Type::kString)
        fail("names a global by something else than text");
      return push_global(module, name);
    }
    case kReduce:
      return reduce();
    case kNewObj: {
      const Ref arguments = pop();
      const Ref callee = pop();
      if (type(callee) != Type::kGlobal) fail("makes an object of a ", to_string(type(callee)));
      return push(add(Type::kRecord, callee, arguments, Graph::kNoState));
    }
    case kBuild:
      return build();
    case kBinPersId: {
      if (!options_.allow_persistent) break;
      const Ref id = pop();
      return push(add(Type::kPersistent, 0, id, 0));
    }
    case kMemoize:
      return put(memoized_++, top());
    case kBinPut: {
      const uint64_t index = little(1);
      ++memoized_;
      return put(index, top());
    }
    case kLongBinPut: {
      const uint64_t index = little(4);
      ++memoized_;
      return put(index, top());
    }
    case kBinGet:
      return get(little(1));
    case kLongBinGet:
      return get(little(4));
    default:
      break;
  }
  FSDP2_THROW(kUnsupported, "[pickle] ", what_, ": byte ", position_ - 1, ": opcode ", static_cast<int>(opcode),
              " is outside of what a checkpoint needs");
}

Graph Machine::run() {
  while (true) {
    const uint8_t opcode = static_cast<uint8_t>(take(1)[0]);
    if (opcode == kStop) break;
    step(opcode);
  }
  if (stack_.size() != 1 || !marks_.empty())
    fail("ends with ", stack_.size(), " objects on the stack; one is expected");
  graph_.root_ = stack_[0];
  return std::move(graph_);
}

Graph read(std::string_view input, std::string_view what, const ReadOptions& options) {
  return Machine(input, what, options).run();
}

}  // namespace fsdp2::pickle
