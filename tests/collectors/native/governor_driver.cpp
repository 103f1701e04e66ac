// Says what the governor says: a budget, then the share of each window on standard input; and which numbers are sampled.
#include <cstdio>

#include "governor.h"

int main() {
  double budget = 0, share = 0;
  if (scanf("%lf", &budget) != 1) return 1;
  commwatch::Governor governor(budget);
  while (scanf("%lf", &share) == 1) printf("%d ", static_cast<int>(governor.window(share)));
  for (uint32_t seq = 0; seq < 100'000; ++seq) {
    if (commwatch::is_sampled(seq)) printf("%u ", seq);
  }
}
