// A button that copies each block of code; of a transcript only the commands, without their prompts.
for (const block of document.querySelectorAll(".highlight")) {
  const button = document.createElement("button");
  button.className = "copy";
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const text = block.querySelector("pre").innerText;
    const commands = text.split("\n").filter((line) => line.startsWith("$ ")).map((line) => line.slice(2));
    if (!navigator.clipboard) {  // a page that came without TLS from another machine: the reader presses Ctrl-C
      getSelection().selectAllChildren(block.querySelector("pre"));
      return;
    }
    await navigator.clipboard.writeText(commands.length ? commands.join("\n") : text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  block.append(button);
}
