package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const (
	shimPath = "github.com/rdmanet/rdmanet/suites/shim"
	shimName = "rdmanetshim" // shimName is the name of shim in the rewritten files.
)

// replacements has the names of shim that replace names of the standard library.
var replacements = map[string]map[string]string{
	"net": {
		"Dial":         "Dial",
		"DialTCP":      "DialTCP",
		"DialTimeout":  "DialTimeout",
		"Dialer":       "Dialer",
		"Listen":       "Listen",
		"ListenConfig": "ListenConfig",
		"ListenTCP":    "ListenTCP",
		"TCPConn":      "TCPConn",
		"TCPListener":  "TCPListener",
	},
	"crypto/tls": {
		"Dial":           "TLSDial",
		"DialWithDialer": "TLSDialWithDialer",
		"Dialer":         "TLSDialer",
		"Listen":         "TLSListen",
	},
	"testing/synctest": {
		"Test": "SynctestTest",
	},
	"net/http/httptest": {
		"NewServer":          "HTTPTestServer",
		"NewTLSServer":       "HTTPTestTLSServer",
		"NewUnstartedServer": "HTTPTestUnstartedServer",
	},
}

// rewriteDir rewrites the Go files of one folder, and returns how many it changed.
func rewriteDir(dir string) (changed int, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return 0, err
	}
	for _, name := range files {
		src, err := os.ReadFile(name)
		if err != nil {
			return changed, err
		}
		out, err := rewrite(name, src)
		if err != nil {
			return changed, err
		}
		if bytes.Equal(src, out) {
			continue
		}
		if err := os.WriteFile(name, out, 0o666); err != nil {
			return changed, err
		}
		changed++
	}
	return changed, nil
}

// edit is a replacement of the bytes from begin to end.
type edit struct {
	begin, end int
	text       string
}

// rewrite returns the source of a file in which names of shim replace those of the standard
// library. Lines keep their numbers, so that the output of a failing test fits the original
// too.
func rewrite(name string, src []byte) ([]byte, error) {
	fset := token.NewFileSet()
	// The resolution of identifiers is deprecated, but it distinguishes an import from a
	// variable of the same name.
	file, err := parser.ParseFile(fset, name, src, parser.ParseComments)
	if err != nil {
		return nil, err
	}
	r := rewriter{fset: fset, imports: importNames(file), left: make(map[string]int)}
	ast.Inspect(file, r.visit)
	if len(r.edits) == 0 {
		return src, nil
	}
	for _, spec := range file.Imports {
		path, _ := strconv.Unquote(spec.Path.Value)
		if replacements[path] == nil || r.left[path] > 0 || spec.Name != nil && (spec.Name.Name == "_" || spec.Name.Name == ".") {
			continue
		}
		// Nothing uses this import any more. Without a name it must not stay.
		r.replace(spec.Pos(), spec.Path.End(), "_ "+spec.Path.Value)
	}
	r.insert(file.Name.End(), fmt.Sprintf("; import %s %q", shimName, shimPath))
	return r.apply(src), nil
}

// importNames returns the paths of the imports by the names that the file uses.
func importNames(file *ast.File) map[string]string {
	names := make(map[string]string)
	for _, spec := range file.Imports {
		path, _ := strconv.Unquote(spec.Path.Value)
		name := path[strings.LastIndex(path, "/")+1:]
		if spec.Name != nil {
			name = spec.Name.Name
		}
		names[name] = path
	}
	return names
}

type rewriter struct {
	fset    *token.FileSet
	imports map[string]string
	left    map[string]int // left counts how often an import's package is still used.
	edits   []edit
}

func (r *rewriter) visit(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.SelectorExpr:
		path := r.packageOf(n.X)
		if to := replacements[path][n.Sel.Name]; to != "" {
			r.replace(n.Pos(), n.End(), shimName+"."+to)
		} else {
			r.left[path]++
		}
	case *ast.UnaryExpr:
		if lit, ok := n.X.(*ast.CompositeLit); ok && n.Op == token.AND && r.isHTTPTransport(lit.Type) {
			r.insert(n.Pos(), shimName+".Transport(")
			r.insert(n.End(), ")")
		}
	case *ast.CallExpr:
		if r.isTestClient(n) {
			r.insert(n.Pos(), shimName+".HTTPTestClient(")
			r.insert(n.End(), ")")
		}
	}
	return true
}

// packageOf returns the path of the imported package that x names, if x names one.
func (r *rewriter) packageOf(x ast.Expr) string {
	if id, ok := x.(*ast.Ident); ok && id.Obj == nil {
		return r.imports[id.Name]
	}
	return ""
}

func (r *rewriter) isHTTPTransport(x ast.Expr) bool {
	sel, ok := x.(*ast.SelectorExpr)
	return ok && sel.Sel.Name == "Transport" && r.packageOf(sel.X) == "net/http"
}

// isTestClient reports whether call may be a call of the method Client of httptest.Server.
func (r *rewriter) isTestClient(call *ast.CallExpr) bool {
	sel, ok := call.Fun.(*ast.SelectorExpr)
	return ok && sel.Sel.Name == "Client" && len(call.Args) == 0 && r.packageOf(sel.X) == "" && r.imports["httptest"] != ""
}

func (r *rewriter) insert(at token.Pos, text string) { r.replace(at, at, text) }

func (r *rewriter) replace(begin, end token.Pos, text string) {
	r.edits = append(r.edits, edit{r.fset.Position(begin).Offset, r.fset.Position(end).Offset, text})
}

// apply makes the edits. Insertions at the same place keep their order. No edit is inside
// another one.
func (r *rewriter) apply(src []byte) []byte {
	slices.SortStableFunc(r.edits, func(a, b edit) int { return a.begin - b.begin })
	var out bytes.Buffer
	at := 0
	for _, e := range r.edits {
		out.Write(src[at:e.begin])
		out.WriteString(e.text)
		at = e.end
	}
	out.Write(src[at:])
	return out.Bytes()
}
