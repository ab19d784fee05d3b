// Chapter: kernels
// Operators that draw random numbers from the device's generator.
//
// The state is taken on the host, when the operator is called; the numbers are
// made by the kernel, when the stream comes to it. So the order of the calls
// decides, and neither streams nor threads do.
#define AT_PER_OPERATOR_HEADERS // in the headers of ATen's templates, too
#include <ATen/Dispatch_v2.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/core/TransformationHelper.h>
#include <ATen/native/DistributionTemplates.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/UnaryOps.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/multinomial_native.h>
#include <ATen/ops/result_type.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "openreg/csrc/generator.h"
#include "openreg/csrc/launch.h"
#include "openreg/csrc/ops/arguments.h"

namespace openreg {
namespace {

using Philox = at::Philox4_32;
using Given = std::optional<at::Generator>;

constexpr char kRandomName[] = "random";
constexpr char kDropoutName[] = "dropout";

// [kernels: words]
std::uint64_t word64(Philox& engine) {
  const std::uint64_t high = engine();
  return high << 32 | engine();
}

// Four words of 32 bits make four floats or two doubles.
template <typename T>
constexpr std::size_t kPerGroup = sizeof(T) > 4 ? 2 : 4;

// Evenly spread over [from, to).
template <typename T>
at::dist_acctype<T> uniform(Philox& engine, T from, T to) {
  if constexpr (sizeof(T) > 4) {
    return at::transformation::uniform_real<T>(word64(engine), from, to);
  } else {
    return at::transformation::uniform_real<T>(engine(), from, to);
  }
}

// Box and Muller's two normal numbers from two uniform ones.
template <typename T>
void normalPair(Philox& engine, T& first, T& second) {
  const T radius = std::sqrt(-2 * std::log(1 - uniform<T>(engine, 0, 1)));
  const T angle = uniform<T>(engine, 0, 1) * static_cast<T>(2 * M_PI);
  first = radius * std::cos(angle);
  second = radius * std::sin(angle);
}
// [/kernels: words]

// [kernels: generate]
// Fill a contiguous CPU tensor: each group of elements from a subsequence of
// its own, whichever thread makes it. `draw` makes a group's elements.
template <typename T, typename Draw>
void generate(const at::Tensor& out, PhiloxState state, Draw draw) {
  using Group = decltype(draw(std::declval<Philox&>()));
  constexpr std::int64_t per = std::tuple_size_v<Group>;
  T* const data = out.mutable_data_ptr<T>();
  const std::int64_t count = out.numel();
  const auto groups = [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t group = begin; group < end; ++group) {
      Philox engine(
          state.seed, static_cast<std::uint64_t>(group), state.offset / 4);
      const Group made = draw(engine);
      const std::int64_t first = group * per;
      std::copy_n(made.begin(), std::min(per, count - first), data + first);
    }
  };
  at::parallel_for(0, (count + per - 1) / per, 2048, groups);
}
// [/kernels: generate]

// [kernels: sample]
// Launch a kernel that fills `self`. `fill` gets a contiguous CPU tensor.
template <typename Fill>
void sample(const at::Tensor& self, const Given& given, Fill fill) {
  if (self.numel() == 0) {
    return;
  }
  at::assert_no_internal_overlap(self);
  Generator& generator = generatorFor(given, self.device());
  PhiloxState state;
  {
    const std::lock_guard lock(generator.mutex_);
    state = generator.take(4); // one group of numbers for each subsequence
  }
  const c10::DeviceGuard guard(self.device());
  launch<kRandomName>([to = deviceView(self), state, fill] {
    const at::Tensor out =
        to.is_contiguous() ? to
                           : at::empty_like(to, at::MemoryFormat::Contiguous);
    fill(out, state);
    if (!out.is_same(to)) {
      to.copy_(out);
    }
  });
}

// As above for a distribution that is drawn number by number.
template <typename T, typename One>
void drawEach(const at::Tensor& out, PhiloxState state, One one) {
  generate<T>(out, state, [one](Philox& engine) {
    std::array<T, kPerGroup<T>> group;
    for (T& element : group) {
      element = static_cast<T>(one(engine));
    }
    return group;
  });
}
// [/kernels: sample]

#define OPENREG_FLOATING(TYPE, NAME, ...) \
  AT_DISPATCH_V2(                         \
      TYPE,                               \
      NAME,                               \
      AT_WRAP(__VA_ARGS__),               \
      AT_EXPAND(AT_FLOATING_TYPES),       \
      at::kHalf,                          \
      at::kBFloat16)

#define OPENREG_ALL_TYPES(TYPE, NAME, ...)    \
  AT_DISPATCH_V2(                             \
      TYPE,                                   \
      NAME,                                   \
      AT_WRAP(__VA_ARGS__),                   \
      AT_EXPAND(AT_ALL_TYPES),                \
      AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES), \
      at::kBool,                              \
      at::kHalf,                              \
      at::kBFloat16)

// The kernels that ATen's templates ask for. The templates check arguments and
// refuse a generator of another kind of device, as for every other device.

// [kernels: uniform]
template <typename>
struct UniformKernel {
  void operator()(
      at::TensorIteratorBase& iter,
      double from,
      double to,
      const Given& given) {
    const at::Tensor& self = iter.tensor(0);
    OPENREG_FLOATING(self.scalar_type(), "uniform_", [&] {
      const auto low = static_cast<scalar_t>(from);
      const auto high = static_cast<scalar_t>(to);
      sample(self, given, [=](const at::Tensor& out, PhiloxState state) {
        drawEach<scalar_t>(out, state, [=](Philox& engine) {
          const auto drawn =
              static_cast<scalar_t>(uniform<scalar_t>(engine, low, high));
          return drawn == high ? low : drawn; // rounded up to the open end
        });
      });
    });
  }
};
// [/kernels: uniform]

template <typename>
struct NormalKernel {
  void operator()(
      const at::Tensor& self,
      double mean,
      double deviation,
      const Given& given) {
    OPENREG_FLOATING(self.scalar_type(), "normal_", [&] {
      using Wide = at::dist_acctype<scalar_t>;
      sample(self, given, [=](const at::Tensor& out, PhiloxState state) {
        generate<scalar_t>(out, state, [=](Philox& engine) {
          std::array<scalar_t, kPerGroup<Wide>> group;
          for (std::size_t i = 0; i < group.size(); i += 2) {
            Wide a;
            Wide b;
            normalPair(engine, a, b);
            group[i] = static_cast<scalar_t>(a * deviation + mean);
            group[i + 1] = static_cast<scalar_t>(b * deviation + mean);
          }
          return group;
        });
      });
    });
  }
};

// Distributions that are a function of one uniform number.
template <typename Transform>
void transformed(
    const at::Tensor& self, const Given& given, Transform transform) {
  OPENREG_ALL_TYPES(self.scalar_type(), "random", [&] {
    using Wide =
        std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    sample(self, given, [=](const at::Tensor& out, PhiloxState state) {
      generate<scalar_t>(out, state, [=](Philox& engine) {
        std::array<scalar_t, kPerGroup<Wide>> group;
        for (scalar_t& element : group) {
          const auto drawn = uniform<Wide>(engine, 0, 1);
          element = static_cast<scalar_t>(transform(drawn));
        }
        return group;
      });
    });
  });
}

template <typename>
struct ExponentialKernel {
  void operator()(
      at::TensorIteratorBase& iter, double lambda, const Given& given) {
    transformed(iter.tensor(0), given, [=](auto drawn) {
      using T = decltype(drawn);
      // Never 0: multinomial divides by it.
      return std::max(
          at::transformation::exponential<T>(drawn, static_cast<T>(lambda)),
          std::numeric_limits<T>::min());
    });
  }
};

template <typename>
struct CauchyKernel {
  void operator()(
      at::TensorIteratorBase& iter,
      double median,
      double sigma,
      const Given& given) {
    transformed(iter.tensor(0), given, [=](auto drawn) {
      using T = decltype(drawn);
      return at::transformation::cauchy<T>(
          drawn, static_cast<T>(median), static_cast<T>(sigma));
    });
  }
};

template <typename>
struct GeometricKernel {
  void operator()(at::TensorIteratorBase& iter, double p, const Given& given) {
    transformed(iter.tensor(0), given, [=](auto drawn) {
      using T = decltype(drawn);
      const T trials =
          at::transformation::geometric<T>(1 - drawn, static_cast<T>(p));
      return std::max(trials, T{1}); // none for a drawn 0
    });
  }
};

template <typename>
struct LogNormalKernel {
  void operator()(
      at::TensorIteratorBase& iter,
      double mean,
      double deviation,
      const Given& given) {
    NormalKernel<Generator>()(iter.tensor(0), mean, deviation, given);
    const c10::DeviceGuard guard(iter.device(0));
    launch<kRandomName>([to = deviceView(iter.tensor(0))] { to.exp_(); });
  }
};

// [kernels: bernoulli]
template <typename>
struct BernoulliKernel {
  void operator()(const at::Tensor& self, double p, const Given& given) {
    transformed(self, given, [=](auto drawn) { return drawn < p; });
  }

  // A probability for each element, checked on the device: a wrong one is
  // reported as every failed kernel is.
  void operator()(
      const at::Tensor& self, const at::Tensor& p, const Given& given) {
    const at::Tensor each = p.to(self.device()).expand(self.sizes());
    sample(
        self,
        given,
        [each = deviceView(each)](const at::Tensor& out, PhiloxState state) {
          const at::Tensor wide = each.to(at::kDouble).contiguous();
          const double* const limit = wide.const_data_ptr<double>();
          TORCH_CHECK(
              std::all_of(
                  limit,
                  limit + wide.numel(),
                  [](double value) { return value >= 0 && value <= 1; }),
              "bernoulli_ expects every p to be in [0, 1]");
          const at::Tensor drawn = at::empty_like(wide);
          drawEach<double>(drawn, state, [](Philox& engine) {
            return uniform<double>(engine, 0, 1);
          });
          out.copy_(drawn.lt(wide));
        });
  }
};
// [/kernels: bernoulli]

template <typename>
struct RandomKernel {
  void operator()(at::TensorIteratorBase& iter, const Given& given) {
    const at::Tensor& self = iter.tensor(0);
    OPENREG_ALL_TYPES(self.scalar_type(), "random_", [&] {
      sample(self, given, [](const at::Tensor& out, PhiloxState state) {
        generate<scalar_t>(out, state, [](Philox& engine) {
          std::array<scalar_t, 2> group;
          for (scalar_t& element : group) {
            const std::uint64_t word = word64(engine);
            if constexpr (std::is_same_v<scalar_t, std::uint64_t>) {
              element = word; // all of them: the template would divide by 0
            } else {
              element = at::transformation::uniform_int<scalar_t>(word);
            }
          }
          return group;
        });
      });
    });
  }
};

template <typename>
struct RandomRangeKernel {
  // From `base` on, `range` different values; 0 stands for 2 to the 64th.
  void operator()(
      at::TensorIteratorBase& iter,
      std::uint64_t range,
      std::int64_t base,
      const Given& given) {
    const at::Tensor& self = iter.tensor(0);
    OPENREG_ALL_TYPES(self.scalar_type(), "random_", [&] {
      sample(self, given, [=](const at::Tensor& out, PhiloxState state) {
        generate<scalar_t>(out, state, [=](Philox& engine) {
          std::array<scalar_t, 2> group;
          for (scalar_t& element : group) {
            const std::uint64_t word = word64(engine);
            element =
                range == 0
                    ? at::transformation::uniform_int_full_range<scalar_t>(word)
                    : at::transformation::uniform_int_from_to<scalar_t>(
                          word, range, base);
          }
          return group;
        });
      });
    });
  }

  void operator()(at::TensorIteratorBase& iter, const Given& given) {
    (*this)(iter, 0, 0, given);
  }
};

namespace templates = at::native::templates;

at::Tensor& uniform_(at::Tensor& self, double from, double to, Given given) {
  return templates::uniform_impl_<UniformKernel, Generator>(
      self, from, to, given);
}

at::Tensor& normal_(at::Tensor& self, double mean, double std, Given given) {
  return templates::normal_impl_<NormalKernel, Generator>(
      self, mean, std, given);
}

at::Tensor normalTensorFloat(const at::Tensor& mean, double std, Given given) {
  return templates::normal_impl<NormalKernel, Generator>(mean, std, given);
}

at::Tensor normalFloatTensor(double mean, const at::Tensor& std, Given given) {
  return templates::normal_impl<NormalKernel, Generator>(mean, std, given);
}

at::Tensor normalTensorTensor(
    const at::Tensor& mean, const at::Tensor& std, Given given) {
  return templates::normal_impl<NormalKernel, Generator>(mean, std, given);
}

at::Tensor& exponential_(at::Tensor& self, double lambda, Given given) {
  TORCH_CHECK(
      at::isFloatingType(self.scalar_type()),
      "Exponential distribution is a continuous probability distribution. "
      "dtype must be a floating point but you specified ",
      self.scalar_type());
  return templates::exponential_impl_<ExponentialKernel, Generator>(
      self, lambda, given);
}

at::Tensor& cauchy_(
    at::Tensor& self, double median, double sigma, Given given) {
  return templates::cauchy_impl_<CauchyKernel, Generator>(
      self, median, sigma, given);
}

at::Tensor& geometric_(at::Tensor& self, double p, Given given) {
  return templates::geometric_impl_<GeometricKernel, Generator>(self, p, given);
}

at::Tensor& logNormal_(at::Tensor& self, double mean, double std, Given given) {
  return templates::log_normal_impl_<LogNormalKernel, Generator>(
      self, mean, std, given);
}

at::Tensor& bernoulliFloat(at::Tensor& self, double p, Given given) {
  return templates::bernoulli_impl_<BernoulliKernel, Generator>(self, p, given);
}

at::Tensor& bernoulliTensor(
    at::Tensor& self, const at::Tensor& p, Given given) {
  return templates::bernoulli_impl_<BernoulliKernel, Generator>(self, p, given);
}

at::Tensor& bernoulliOut(const at::Tensor& self, Given given, at::Tensor& out) {
  out.resize_(self.sizes());
  return bernoulliTensor(out, self, given);
}

at::Tensor& random_(at::Tensor& self, Given given) {
  return templates::random_impl<RandomKernel, Generator>(self, given);
}

at::Tensor& randomTo(at::Tensor& self, std::int64_t to, Given given) {
  return templates::random_from_to_impl<RandomRangeKernel, Generator>(
      self, 0, to, given);
}

at::Tensor& randomFrom(
    at::Tensor& self,
    std::int64_t from,
    std::optional<std::int64_t> to,
    Given given) {
  return templates::random_from_to_impl<RandomRangeKernel, Generator>(
      self, from, to, given);
}

// [kernels: randperm]
// Fisher and Yates' shuffle. Each step has a subsequence of its own: in one
// subsequence, the next kernel's numbers would be among ours.
at::Tensor& randpermOut(std::int64_t n, Given given, at::Tensor& out) {
  TORCH_CHECK(n >= 0, "randperm needs n of at least 0, not ", n);
  at::native::check_supported_max_int_with_precision(
      n, at::empty({0}, out.options().device(at::kCPU)));
  out.resize_({n});
  sample(out, given, [n](const at::Tensor& result, PhiloxState state) {
    std::vector<std::int64_t> order(static_cast<std::size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t last = order.size(); last > 1; --last) {
      Philox engine(state.seed, last, state.offset / 4);
      std::swap(order[last - 1], order[word64(engine) % last]);
    }
    result.copy_(at::from_blob(order.data(), {n}, at::kLong));
  });
  return out;
}
// [/kernels: randperm]

// [kernels: multinomial]
// The stub that ATen's multinomial calls for draws with replacement; those
// without it, ATen makes of exponential_ and topk.
} // namespace

static void multinomialKernel(
    at::Tensor& result,
    const at::Tensor& weights,
    std::int64_t draws,
    Given given) {
  sample(
      result,
      given,
      [weights = deviceView(weights), draws](
          const at::Tensor& out, PhiloxState state) {
        const at::Tensor wide = weights.to(at::kDouble);
        const at::Tensor sums = wide.cumsum(-1).contiguous();
        const at::Tensor totals = sums.select(-1, -1);
        TORCH_CHECK(
            wide.ge(0).all().item<bool>() && totals.gt(0).all().item<bool>() &&
                totals.isfinite().all().item<bool>(),
            "multinomial expects finite weights of at least 0 that are not all "
            "0 in a row");
        const double* const limits = sums.const_data_ptr<double>();
        const std::int64_t choices = weights.size(-1);
        std::int64_t* const chosen = out.mutable_data_ptr<std::int64_t>();
        for (std::int64_t i = 0; i < out.numel(); ++i) {
          Philox engine(
              state.seed, static_cast<std::uint64_t>(i), state.offset / 4);
          const double* const row = limits + i / draws * choices;
          const double at = uniform<double>(engine, 0, row[choices - 1]);
          chosen[i] = std::upper_bound(row, row + choices - 1, at) - row;
        }
      });
}

namespace {
// [/kernels: multinomial]

// [kernels: dropout]
void scaled(
    at::Tensor to, const at::Tensor& from, const at::Tensor& kept, double by) {
  at::mul_out(to, from, kept).mul_(by);
}

// Without `training` nothing is dropped.
std::tuple<at::Tensor, at::Tensor> nativeDropout(
    const at::Tensor& input, double p, std::optional<bool> training) {
  TORCH_CHECK(
      at::canCast(at::kFloat, input.scalar_type()),
      "result type Float can't be cast to the desired output type ",
      input.scalar_type());
  const at::Tensor mask =
      at::empty_like(input, input.options().dtype(at::kBool));
  const at::Tensor output = at::empty_like(input);
  if (!training.value_or(true)) {
    mask.fill_(true);
    output.copy_(input);
    return {output, mask};
  }
  at::Tensor drawn = mask;
  bernoulliFloat(drawn, 1 - p, std::nullopt);
  const double scale = p == 1 ? 0 : 1 / (1 - p);
  const c10::DeviceGuard guard(input.device());
  launch<kDropoutName>([to = deviceView(output),
                        from = deviceView(input),
                        kept = deviceView(mask),
                        scale] { scaled(to, from, kept, scale); });
  return {output, mask};
}

at::Tensor nativeDropoutBackward(
    const at::Tensor& gradient, const at::Tensor& mask, double scale) {
  const c10::DeviceGuard guard(
      commonDevice("native_dropout_backward", gradient, mask));
  // An integer times the scale is none.
  const at::Tensor result = at::empty_like(
      gradient,
      gradient.options().dtype(at::result_type(gradient, at::Scalar(scale))));
  launch<kDropoutName>([to = deviceView(result),
                        from = deviceView(gradient),
                        kept = deviceView(mask),
                        scale] { scaled(to, from, kept, scale); });
  return result;
}
// [/kernels: dropout]

} // namespace

// [kernels: stub]
} // namespace openreg

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(
    multinomial_with_replacement_stub, &openreg::multinomialKernel)
} // namespace at::native

namespace openreg {
// [/kernels: stub]

// [kernels: register-random]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("uniform_", &uniform_);
  m.impl("normal_", &normal_);
  m.impl("normal.Tensor_float", &normalTensorFloat);
  m.impl("normal.float_Tensor", &normalFloatTensor);
  m.impl("normal.Tensor_Tensor", &normalTensorTensor);
  m.impl("exponential_", &exponential_);
  m.impl("cauchy_", &cauchy_);
  m.impl("geometric_", &geometric_);
  m.impl("log_normal_", &logNormal_);
  m.impl("bernoulli_.float", &bernoulliFloat);
  m.impl("bernoulli_.Tensor", &bernoulliTensor);
  m.impl("bernoulli.out", &bernoulliOut);
  m.impl("random_", &random_);
  m.impl("random_.to", &randomTo);
  m.impl("random_.from", &randomFrom);
  m.impl("randperm.generator_out", &randpermOut);
  m.impl("multinomial", &at::native::multinomial);
  m.impl("multinomial.out", &at::native::multinomial_out);
  m.impl("native_dropout", &nativeDropout);
  m.impl("native_dropout_backward", &nativeDropoutBackward);
}
// [/kernels: register-random]

} // namespace openreg
