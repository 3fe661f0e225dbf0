// Users and items in one space: two towers over one table of words, trained so that a user lies closest to the item
// that belongs to them among all items of the batch.
//
//   retrofit_two_tower_before --steps 100 --out two_tower.pt

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

using torch::Tensor;

struct Options {
  int64_t steps = 100;
  std::string out, resume, check;
};

const int64_t num_words = 512;
const int64_t words_per_text = 6;
const int64_t embedding_size = 32;
const int64_t output_size = 24;
const int64_t micro_batch = 16;
const int64_t micro_batches_per_step = 2;

// One of the two towers. The table of words belongs to the whole model.
struct TowerImpl : torch::nn::Module {
  TowerImpl(torch::nn::Embedding words_, int64_t hidden, int64_t depth) : words(words_) {
    int64_t in = embedding_size;
    for (int64_t i = 0; i < depth; ++i) {
      hidden_layers.push_back(register_module("hidden" + std::to_string(i), torch::nn::Linear(in, hidden)));
      norms.push_back(
          register_module("norm" + std::to_string(i), torch::nn::LayerNorm(torch::nn::LayerNormOptions({hidden}))));
      in = hidden;
    }
    project = register_module("project", torch::nn::Linear(in, output_size));
    dropout = register_module("dropout", torch::nn::Dropout(0.1));
  }

  Tensor forward(Tensor text) {
    auto x = words->forward(text).mean(1);
    for (size_t i = 0; i < hidden_layers.size(); ++i) {
      x = dropout->forward(torch::silu(norms[i]->forward(hidden_layers[i]->forward(x))));
    }
    return torch::nn::functional::normalize(project->forward(x));
  }

  torch::nn::Embedding words{nullptr};
  std::vector<torch::nn::Linear> hidden_layers;
  std::vector<torch::nn::LayerNorm> norms;
  torch::nn::Linear project{nullptr};
  torch::nn::Dropout dropout{nullptr};
};
FSDP2_MODULE(Tower);

struct TwoTowerImpl : torch::nn::Module {
  TwoTowerImpl() : words(num_words, embedding_size) {
    register_module("words", words);
    user_tower = register_module("user_tower", Tower(words, 64, 2));
    item_tower = register_module("item_tower", Tower(words, 48, 1));
    temperature = register_parameter("temperature", torch::zeros({1}));
  }

  // Similarities of all users with all items, users by items.
  Tensor forward(Tensor users, Tensor items) {
    return user_tower(users).matmul(item_tower(items).t()) * (temperature + 2.0).exp();
  }

  torch::nn::Embedding words;
  Tower user_tower{nullptr}, item_tower{nullptr};
  Tensor temperature;
};
FSDP2_MODULE(TwoTower);

// A user and an item belong together when their words come from one topic, a range of 16 words.
class Pairs {
 public:
  explicit Pairs(uint64_t seed) : generator_(torch::make_generator<torch::CPUGeneratorImpl>(seed)) {}

  std::pair<Tensor, Tensor> next(int64_t count) {
    auto topics = torch::randperm(num_words / 16, generator_, torch::kLong).slice(0, 0, count).unsqueeze(1) * 16;
    auto text = [&] { return topics + torch::randint(0, 16, {count, words_per_text}, generator_, torch::kLong); };
    auto users = text();
    return {users, text()};
  }

 private:
  torch::Generator generator_;
};

Tensor contrastive_loss(const Tensor& similarities) {
  auto right = torch::arange(similarities.size(0), similarities.device());
  return 0.5 * (torch::nn::functional::cross_entropy(similarities, right) +
                torch::nn::functional::cross_entropy(similarities.t(), right));
}

class Trainer {
 public:
  explicit Trainer(torch::Device device_)
      : device(device_),
        model(std::make_shared<TwoTowerImpl>()),
        optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3).weight_decay(0.01)),
        train_data(11) {
    model->to(device);
    fsdp2::fully_shard({model->user_tower, model->item_tower});
    fsdp2::fully_shard(model);
    if (fsdp2::get_rank() > 0) torch::manual_seed(5 + fsdp2::get_rank());
  }

  double step() {
    model->train();
    optimizer.zero_grad();
    double total = 0;
    auto rows = micro_batch / fsdp2::get_world_size();
    auto mine = [&](const Tensor& t) { return t.narrow(0, fsdp2::get_rank() * rows, rows).to(device); };
    for (int64_t i = 0; i < micro_batches_per_step; ++i) {
      auto [users, items] = train_data.next(micro_batch);
      auto loss = contrastive_loss(fsdp2::call(model, mine(users), mine(items))) / micro_batches_per_step;
      loss.backward();
      fsdp2::all_reduce(loss.detach_().div_(fsdp2::get_world_size()));
      total += loss.item<double>();
    }
    optimizer.step();
    return total;
  }

  // Share of users whose own item is the closest one.
  double recall() {
    torch::NoGradGuard no_grad;
    model->eval();
    auto [users, items] = Pairs(12).next(32);
    auto best = fsdp2::call(model, users.to(device), items.to(device)).argmax(1).cpu();
    return best.eq(torch::arange(32)).to(torch::kDouble).mean().item<double>();
  }

  void save(const std::string& path) {
    fsdp2::dcp::save(state(), path, {.overwrite = true});
  }
  void load(const std::string& path) {
    auto saved = state();
    fsdp2::dcp::load(saved, path, {.allow_missing = {"rng.*"}});
    done = saved["step"].integer();
    for (int64_t i = 0; i < done * micro_batches_per_step; ++i) train_data.next(micro_batch);
  }
  fsdp2::dcp::StateDict state() {
    auto rng = fsdp2::dcp::per_rank(std::make_shared<fsdp2::RngState>());
    return {{"app", fsdp2::app_state(model, optimizer)}, {"step", done}, {"rng", rng}};
  }
  std::string check() { return fsdp2::diagnose(model, &optimizer).to_table(); }
  int64_t done = 0;

 private:
  torch::Device device;
  std::shared_ptr<TwoTowerImpl> model;
  torch::optim::AdamW optimizer;
  Pairs train_data;
};

Options parse(int argc, char** argv) {
  Options options;
  std::vector<std::string> args(argv + 1, argv + argc);
  for (size_t i = 0; i + 1 < args.size(); i += 2) {
    if (args[i] == "--steps") options.steps = std::stol(args[i + 1]);
    if (args[i] == "--out") options.out = args[i + 1];
    if (args[i] == "--resume") options.resume = args[i + 1];
    if (args[i] == "--check") options.check = args[i + 1];
  }
  return options;
}

int main(int argc, char** argv) try {
  const auto options = parse(argc, argv);
  torch::manual_seed(5);
  fsdp2::init_process_group();
  if (fsdp2::get_rank() != 0) std::cout.setstate(std::ios::failbit);
  Trainer trainer(fsdp2::local_device());
  if (!options.resume.empty()) trainer.load(options.resume);
  for (int64_t& step = trainer.done; step < options.steps; ++step) {
    std::cout << "step " << step << " loss " << trainer.step() << '\n';
  }
  if (!options.check.empty()) std::cout << trainer.check() << '\n';
  std::cout << "recall " << trainer.recall() << '\n';
  if (!options.out.empty()) trainer.save(options.out);
  fsdp2::destroy_process_group();
} catch (const c10::Error& error) {
  return std::cerr << "error: " << error.what_without_backtrace() << '\n', 1;
}
