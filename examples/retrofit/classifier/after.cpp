// Trains a small residual network on pictures of coloured shapes.
//
//   retrofit_classifier_before --steps 60 --save classifier.pt

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

struct Config {
  int steps = 60;
  int64_t batch_size = 32;
  int64_t image_size = 16;
  int64_t num_classes = 6;
  int64_t width = 16;
  double lr = 0.05;
  double momentum = 0.9;
  double weight_decay = 1e-4;
  uint64_t seed = 17;
  std::string save_path, load_path, check;
};

// A bar or a disc in one of three colours, on noise. The label is shape * 3 + colour.
class ShapesDataset : public torch::data::datasets::Dataset<ShapesDataset> {
 public:
  ShapesDataset(size_t num_examples, int64_t image_size, uint64_t seed) : num_examples_(num_examples) {
    torch::Generator generator = torch::make_generator<torch::CPUGeneratorImpl>(seed);
    const auto n = static_cast<int64_t>(num_examples);
    images_ = 0.3 * torch::randn({n, 3, image_size, image_size}, generator);
    labels_ = torch::randint(0, 6, {n}, generator, torch::kLong);
    auto places = torch::randint(4, image_size - 4, {n, 2}, generator, torch::kLong);
    for (int64_t i = 0; i < n; ++i) {
      const auto label = labels_[i].item<int64_t>();
      const auto y = places[i][0].item<int64_t>(), x = places[i][1].item<int64_t>();
      auto channel = images_[i][label % 3];
      if (label / 3 == 0) {
        channel.slice(0, y - 1, y + 1).slice(1, x - 4, x + 4) += 1.5;
      } else {
        channel.slice(0, y - 2, y + 3).slice(1, x - 1, x + 2) += 1.5;
        channel.slice(0, y - 1, y + 2).slice(1, x - 2, x + 3) += 0.5;
      }
    }
  }

  torch::data::Example<> get(size_t index) override {
    return {images_[static_cast<int64_t>(index)], labels_[static_cast<int64_t>(index)]};
  }
  torch::optional<size_t> size() const override { return num_examples_; }

 private:
  size_t num_examples_;
  torch::Tensor images_, labels_;
};

torch::nn::Conv2d conv3x3(int64_t in, int64_t out, int64_t stride) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).stride(stride).padding(1).bias(false));
}

class ResidualBlockImpl : public torch::nn::Module {
 public:
  ResidualBlockImpl(int64_t in, int64_t out, int64_t stride)
      : conv1(conv3x3(in, out, stride)), conv2(conv3x3(out, out, 1)), bn1(out), bn2(out) {
    register_module("conv1", conv1);
    register_module("bn1", bn1);
    register_module("conv2", conv2);
    register_module("bn2", bn2);
    if (in != out || stride != 1) {
      shortcut =
          torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 1).stride(stride).bias(false)),
                                torch::nn::BatchNorm2d(out));
      register_module("shortcut", shortcut);
    }
    // Starts as the identity.
    torch::nn::init::zeros_(bn2->weight);
  }

  torch::Tensor forward(torch::Tensor x) {
    auto out = torch::relu(bn1->forward(conv1->forward(x)));
    out = bn2->forward(conv2->forward(out));
    out += shortcut.is_empty() ? x : shortcut->forward(x);
    return torch::relu(out);
  }

  torch::nn::Conv2d conv1, conv2;
  torch::nn::BatchNorm2d bn1, bn2;
  torch::nn::Sequential shortcut{nullptr};
};
FSDP2_MODULE(ResidualBlock);

class ClassifierImpl : public torch::nn::Module {
 public:
  ClassifierImpl(int64_t width, int64_t num_classes) : stem(conv3x3(3, width, 1)), head(4 * width, num_classes) {
    register_module("stem", stem);
    layers->push_back(ResidualBlock(width, width, 1));
    layers->push_back(ResidualBlock(width, 2 * width, 2));
    layers->push_back(ResidualBlock(2 * width, 4 * width, 2));
    register_module("layers", layers);
    register_module("head", head);
    mean = register_buffer("mean", torch::full({3, 1, 1}, 0.1));
    std = register_buffer("std", torch::full({3, 1, 1}, 0.4));
    for (auto& module : modules(/*include_self=*/false)) {
      if (auto* conv = module->as<torch::nn::Conv2d>()) {
        torch::nn::init::kaiming_normal_(conv->weight, 0, torch::kFanOut, torch::kReLU);
      }
    }
  }

  torch::Tensor forward(torch::Tensor images) {
    auto x = torch::relu(stem->forward((images - mean) / std));
    x = fsdp2::call(layers, x);
    return head->forward(x.mean({2, 3}));
  }

  torch::nn::Conv2d stem;
  torch::nn::Sequential layers;
  torch::nn::Linear head;
  torch::Tensor mean, std;
};
FSDP2_MODULE(Classifier);

double evaluate(Classifier& model, const Config& config, torch::Device device) {
  torch::NoGradGuard no_grad;
  model->eval();
  auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      ShapesDataset(256, config.image_size, config.seed + 1).map(torch::data::transforms::Stack<>()), 64);
  int64_t correct = 0, total = 0;
  for (auto& batch : *loader) {
    auto predicted = model(batch.data.to(device)).argmax(1);
    correct += predicted.eq(batch.target.to(device)).sum().item<int64_t>();
    total += batch.target.size(0);
  }
  model->train();
  return static_cast<double>(correct) / static_cast<double>(total);
}

int main(int argc, char** argv) try {
  Config config;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!std::strcmp(argv[i], "--steps")) config.steps = std::atoi(argv[i + 1]);
    if (!std::strcmp(argv[i], "--save")) config.save_path = argv[i + 1];
    if (!std::strcmp(argv[i], "--load")) config.load_path = argv[i + 1];
    if (!std::strcmp(argv[i], "--check")) config.check = argv[i + 1];
  }
  torch::manual_seed(config.seed);
  fsdp2::init_process_group();
  const int rank = fsdp2::get_rank(), ranks = fsdp2::get_world_size();
  if (rank != 0) std::freopen("/dev/null", "w", stdout);
  torch::Device device = fsdp2::local_device();

  Classifier model(config.width, config.num_classes);
  model->to(device);
  fsdp2::fully_shard({model->layers[0], model->layers[1]});
  fsdp2::fully_shard(model->layers[2]);
  fsdp2::fully_shard(model);
  torch::optim::SGD optimizer(
      model->parameters(),
      torch::optim::SGDOptions(config.lr).momentum(config.momentum).weight_decay(config.weight_decay));

  auto dataset = ShapesDataset(1024, config.image_size, config.seed).map(torch::data::transforms::Stack<>());
  auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      std::move(dataset), torch::data::DataLoaderOptions(config.batch_size));

  auto state = [&](int64_t step) {
    return fsdp2::dcp::StateDict{{"app", fsdp2::app_state(model, optimizer)}, {"step", step}};
  };
  auto mine = [&](const torch::Tensor& t) { return t.slice(0, rank, t.size(0) / ranks * ranks, ranks).to(device); };
  int step = 0, resumed = 0;
  if (auto saved = state(0); !config.load_path.empty()) {
    fsdp2::dcp::load(saved, config.load_path);
    resumed = static_cast<int>(saved["step"].integer());
  }
  while (step < config.steps) {
    for (auto& batch : *loader) {
      if (step == config.steps) break;
      if (step < resumed && ++step) continue;
      auto images = mine(batch.data), labels = mine(batch.target);
      optimizer.zero_grad();
      auto logits = model(images);
      auto loss = torch::nn::functional::cross_entropy(logits, labels);
      loss.backward();
      optimizer.step();
      for (auto& buffer : model->buffers()) {
        if (buffer.is_floating_point()) fsdp2::all_reduce(buffer, fsdp2::ReduceOp::AVG);
      }
      auto shown = torch::stack({loss.detach(), logits.argmax(1).eq(labels).to(torch::kFloat).mean()}) / ranks;
      fsdp2::all_reduce(shown);
      std::printf("step %d loss %.6f accuracy %.3f\n", step, shown[0].item<float>(), shown[1].item<float>());
      ++step;
    }
  }
  if (!config.check.empty()) std::printf("%s\n", fsdp2::diagnose(model, &optimizer).to_table().c_str());
  std::printf("test accuracy %.3f\n", evaluate(model, config, device));

  if (!config.save_path.empty()) {
    fsdp2::dcp::save(state(step), config.save_path, {.overwrite = true});
    std::printf("saved %s\n", config.save_path.c_str());
  }
  fsdp2::destroy_process_group();
  return 0;
} catch (const c10::Error& error) {
  return std::fprintf(stderr, "error: %s\n", error.what_without_backtrace()), 1;
}
