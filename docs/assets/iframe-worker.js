// Browsers start no worker from a page on disk. There, the search's worker runs in a hidden frame instead.
if (location.protocol === "file:") {
  const tell = (call, data) => setTimeout(() => call(new MessageEvent("message", { data: structuredClone(data) })))
  window.Worker = class {
    constructor(address) {
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = "<script><\/script>"
      this.frame.onload = () => {
        const inside = this.frame.contentWindow, script = inside.document.createElement("script")
        inside.postMessage = data => tell(event => this.onmessage?.(event), data)
        script.src = address
        script.onload = () => {
          this.inside = inside
          this.waiting.splice(0).forEach(data => this.postMessage(data))
        }
        script.onerror = () => this.onerror?.(new Event("error", { cancelable: true }))
        inside.document.body.append(script)
      }
      document.body.append(this.frame)
    }
    postMessage(data) {
      if (this.inside) tell(event => this.inside.onmessage(event), data)
      else this.waiting.push(data)
    }
    terminate() { this.frame.remove() }
  }
}
