// backward() on every ISA: promises that need no tolerance. What gradients are is checked in Python, against the
// definition (tests/front/test_gradients.py); rows that do not exist are test_query_lengths.cpp's.

#include "cases.h"
#include "check.h"
#include "oracle.h"
#include "threads.h"

using namespace levelhead;
using oracle::at, oracle::Array, oracle::Case, oracle::Index, oracle::Inputs;
using oracle::inf, oracle::not_a_number;
using cases::draws, cases::on_every_isa, cases::random_case, cases::text;

namespace {

struct Gradient {
  Array dq, dk, dv;

  friend bool operator==(const Gradient& a, const Gradient& b) {
    return a.dq.bytes() == b.dq.bytes() && a.dk.bytes() == b.dk.bytes() && a.dv.bytes() == b.dv.bytes();
  }
};

Gradient gradient_of(Inputs& in, Array& dout) {
  const Case& c = in.c;
  Array out(c.dtype, c.B, c.H, c.T, c.E);
  std::vector<double> logsumexp(at(c.B * c.H * c.T));  // or floats, in half of it
  Interrupt never;
  Result result;
  result.out = out.view<MutableTensor>(), result.logsumexp = logsumexp.data();
  CHECK(forward(in.problem(), result, 1, never));
  Gradient o{{c.dtype, c.B, c.H, c.T, c.D}, {c.dtype, c.B, c.G, c.S, c.D}, {c.dtype, c.B, c.G, c.S, c.E}};
  Gradients g;
  g.out = out.view<Tensor>(), g.dout = dout.view<Tensor>(), g.logsumexp = logsumexp.data();
  g.dq = o.dq.view<MutableTensor>(), g.dk = o.dk.view<MutableTensor>(), g.dv = o.dv.view<MutableTensor>();
  CHECK(backward(in.problem(), g, 1, never));
  return o;
}

}  // namespace

TEST(hidden_keys_may_hold_anything) {
  on_every_isa([](DType dtype) {
    for (unsigned seed = 400; seed < 400 + draws / 2; ++seed) {
      Case c = random_case(dtype, seed);
      c.values = true, c.cosine = false;  // the gradient of a key's own norm is NaN where the key is
      if (seed % 2) c.softcap = 2.5;
      Inputs in(c);
      Array dout(c.dtype, c.B, c.H, c.T, c.E);
      dout.fill([&, n = 0]() mutable { return ++n % 7 - 3; });
      const Gradient clean = gradient_of(in, dout);
      for (Index b = 0; b < c.B; ++b)
        for (Index g = 0; g < c.G; ++g)
          for (Index j = 0; j < c.S; ++j) {
            bool seen = false;
            for (Index h = g * (c.H / c.G); h < (g + 1) * (c.H / c.G); ++h)
              for (Index t = 0; t < c.T; ++t) seen = seen || in.visible(b, h, t, j);
            if (seen) continue;
            const double poison = j % 3 == 0 ? not_a_number : j % 3 == 1 ? inf : -inf;
            for (Index d = 0; d < c.D; ++d) in.k.set(b, g, j, d, poison);
            for (Index e = 0; e < c.E; ++e) in.v.set(b, g, j, e, poison);
          }
      CHECK(gradient_of(in, dout) == clean, "%s", text(c).c_str());
    }
  });
}
