// Prints the governor's modes (standard input: a budget, then the share of each window), which numbers are sampled, how many
// operations each of a series represents, and what each of a series of measurements counts.
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
  commwatch::CostTurns turns;
  commwatch::UsualCost usual;
  for (uint64_t n = 0; n < 20'000; ++n) {
    printf("%u ", turns.next(1 + n * n % 1013 * 1000 + n * 3'000'000));
    printf("%llu ", static_cast<unsigned long long>(usual.bound(n * n % 1013 * (n % 5000 < 2500 ? 1 : 100))));
  }
}
