// A kernel of a Jupyter server behind the notebook editor of VS Code. It does with a kernel's messages what Microsoft's
// Jupyter extension does with them, in short and without its settings, so that the look of `%%gpu` can be seen here.

const { randomUUID } = require('crypto')
const vscode = require('vscode')
const { KernelManager, ServerConnection, SessionManager } = require('@jupyterlab/services')

const Item = vscode.NotebookCellOutputItem
const BEST_FIRST = ['application/vnd.', 'text/html', 'text/markdown', 'image/png', 'image/svg+xml', 'text/plain']
const NO_OUTPUT = ['status', 'comm_open', 'comm_msg', 'comm_close']

/** What is run before the first cell, without history, as that extension does: it leaves names in the namespace. */
const atStart = path => [
  'import builtins\ndef __vscode_input(*args, **named):\n    return __vscode_original_input(*args, **named)\n' +
    '__vscode_original_input = builtins.input\nbuiltins.input = __vscode_input\ndel __vscode_input',
  `__vsc_ipynb_file__ = ${JSON.stringify(path)}`,
  '%config Completer.use_jedi = False',
  'import matplotlib\n%matplotlib inline\n_VSCode_defaultMatplotlib_Params = dict(matplotlib.rcParams)'
]

const notebooks = new Map() // its address -> the kernel, the queue, the cell that runs, and each display's output

function activate() {
  const made = vscode.notebooks.createNotebookController('kernel-of-a-server', 'jupyter-notebook', 'Python of the server')
  made.supportedLanguages = ['python']
  made.supportsExecutionOrder = true
  made.interruptHandler = async notebook => (await of(notebook).kernel).interrupt()
  made.executeHandler = (cells, notebook) => {
    const own = of(notebook)
    for (const cell of cells) {
      const execution = made.createNotebookCellExecution(cell)
      own.queue = own.queue.then(() => run(made, own, execution)).catch(error => console.error(error))
    }
  }
  const prefer = one => made.updateNotebookAffinity(one, vscode.NotebookControllerAffinity.Preferred)
  vscode.workspace.notebookDocuments.forEach(prefer)
  vscode.workspace.onDidOpenNotebookDocument(prefer)
}

function of(notebook) {
  const key = notebook.uri.toString()
  if (!notebooks.has(key)) {
    notebooks.set(key, { kernel: started(notebook.uri.fsPath), queue: Promise.resolve(), displays: new Map() })
  }
  return notebooks.get(key)
}

async function started(path) {
  const baseUrl = process.env.JUPYTER_URL
  const serverSettings = ServerConnection.makeSettings({
    ...{ baseUrl, wsUrl: baseUrl.replace(/^http/, 'ws'), token: process.env.JUPYTER_TOKEN, appendToken: true }
  })
  const manager = new SessionManager({ kernelManager: new KernelManager({ serverSettings }), serverSettings })
  await manager.ready
  const unlike = `${path.replace(/.*[/]|[.]ipynb$/g, '')}-${randomUUID()}.ipynb` // no two sessions share a name there
  const session = await manager.startNew({ path: unlike, name: unlike, type: 'notebook', kernel: { name: 'python3' } })
  for (const code of atStart(path)) {
    await session.kernel.requestExecute({ code, store_history: false, stop_on_error: false }).done
  }
  return session.kernel
}

async function run(controller, own, execution) {
  const kernel = await own.kernel
  const asked = new vscode.CancellationTokenSource()
  const state = { stream: null, clears: false, isWell: true, isOver: false }
  own.active = execution
  execution.start(Date.now())
  await execution.clearOutput()
  const code = execution.cell.document.getText().replace(/\r\n/g, '\n')
  const request = kernel.requestExecute({ code, allow_stdin: true, stop_on_error: false, store_history: true }, false, {
    cellId: execution.cell.document.uri.toString()
  })
  let shown = Promise.resolve() // one after the other, as they came
  const add = work => (shown = shown.then(work).catch(error => console.error(error)))
  request.onIOPub = message => void add(() => show(controller, own, execution, state, message))
  request.onReply = ({ content }) => {
    for (const { data } of content.payload ?? []) {
      if (data) add(() => execution.appendOutput(new vscode.NotebookCellOutput([Item.stdout(data['text/plain'])])))
    }
  }
  request.onStdin = async ({ header, content: { prompt, password } }) => {
    const value = await vscode.window.showInputBox({ prompt, password, ignoreFocusOut: true }, asked.token)
    kernel.sendInputReply({ value: value ?? '', status: 'ok' }, header)
  }
  const reply = await request.done
  await shown
  state.isOver = true
  own.active = null
  asked.cancel()
  execution.executionOrder = reply.content.execution_count
  execution.end(state.isWell, Date.now())
}

/** One message. What comes when its cell is done is shown by the cell that runs, or as if this one ran once more. */
async function show(controller, own, execution, state, { header, content }) {
  if (NO_OUTPUT.includes(header.msg_type)) return
  if (!state.isOver) return change(own, execution, execution.cell, state, header.msg_type, content)
  const other = own.active ?? controller.createNotebookCellExecution(execution.cell)
  const isNew = other !== own.active
  if (isNew) other.start()
  await change(own, other, execution.cell, state, header.msg_type, content)
  if (isNew) other.end(state.isWell)
}

/** It is a change of the outputs below a cell. */
async function change(own, execution, cell, state, kind, content) {
  const clear = async () => {
    Object.assign(state, { clears: false, stream: null })
    await execution.clearOutput(cell)
  }
  if (kind === 'clear_output' && content.wait) state.clears = true
  else if (kind === 'clear_output') await clear()
  else if (kind === 'execute_input') execution.executionOrder = content.execution_count
  else if (kind === 'update_display_data') {
    const output = own.displays.get(content.transient?.display_id)
    if (output) await execution.replaceOutputItems(items(content.data), output)
  } else if (kind === 'stream') {
    if (state.clears) await clear()
    const item = content.name === 'stderr' ? Item.stderr(content.text) : Item.stdout(content.text)
    if (state.stream?.name === content.name) return execution.appendOutputItems(item, state.stream.output)
    state.stream = { name: content.name, output: new vscode.NotebookCellOutput([item], { outputType: kind }) }
    await execution.appendOutput(state.stream.output, cell)
  } else if (['display_data', 'execute_result', 'error'].includes(kind)) {
    if (state.clears) await clear()
    const { ename: name, evalue: message, traceback } = content
    const inside = kind === 'error' ? [Item.error({ name, message, stack: traceback.join('\n') })] : items(content.data)
    const output = new vscode.NotebookCellOutput(inside, { outputType: kind, metadata: content.metadata })
    if (content.transient?.display_id) own.displays.set(content.transient.display_id, output)
    state.stream = null
    state.isWell &&= kind !== 'error'
    await execution.appendOutput(output, cell)
  }
}

/** Of a bundle, the best first. */
function items(bundle) {
  const rank = mime => {
    const at = BEST_FIRST.findIndex(one => mime.startsWith(one))
    return at < 0 ? BEST_FIRST.length : at
  }
  const made = mime => {
    const value = Array.isArray(bundle[mime]) ? bundle[mime].join('') : bundle[mime]
    if (typeof value !== 'string') return Item.text(JSON.stringify(value), mime)
    const isBytes = mime.startsWith('image/') && mime !== 'image/svg+xml'
    return isBytes ? new Item(Buffer.from(value, 'base64'), mime) : Item.text(value, mime)
  }
  return Object.keys(bundle).sort((one, two) => rank(one) - rank(two)).map(made)
}

module.exports = { activate }
