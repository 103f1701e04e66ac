// Reads an interval and a budget, then pairs of a time in s and of what checks have taken in ns until then. Prints after each pair which of the first
// numbers are checked. With arguments: the sums of a file, by the size of its elements and where it begins in memory; with lengths after these, in
// elements, the sums of slices.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "checks.h"

int main(int argc, char** argv) {
  if (argc > 3) {
    std::ifstream file(argv[1], std::ios::binary);
    const std::string data = std::string(static_cast<size_t>(atoi(argv[3])), ' ') + std::string(std::istreambuf_iterator<char>(file), {});
    const size_t skipped = static_cast<size_t>(atoi(argv[3]));
    const auto element = static_cast<size_t>(atoi(argv[2]));
    std::vector<int64_t> lengths;
    for (int at = 4; at < argc; ++at) lengths.push_back(atoi(argv[at]));
    if (lengths.empty()) lengths.push_back(static_cast<int64_t>((data.size() - skipped) / element));
    for (const commwatch::Sums& sums : commwatch::checksums(data.data() + skipped, lengths, element, element)) {
      printf("%llu %llu\n", static_cast<unsigned long long>(sums.plain), static_cast<unsigned long long>(sums.weighted));
    }
    return 0;
  }
  commwatch::Checks checks;
  unsigned every = 0;
  double budget = 0, second = 0;
  unsigned long long spent = 0;
  if (checks.on() || checks.due(0) || scanf("%u %lf", &every, &budget) != 2) return 1;
  checks.begin(every, budget);
  while (scanf("%lf %llu", &second, &spent) == 2) {
    checks.spent(spent);
    checks.govern(static_cast<uint64_t>(second * 1e9));
    for (uint32_t seq = 0; seq < 20'000; ++seq) {
      if (checks.due(seq)) printf("%u ", seq);
    }
    printf("\n");
  }
}
