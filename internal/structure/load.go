package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// An arrow is a pair of rooms, the first of which uses the second.
type arrow struct{ from, to string }

// A module is what load has read: its rooms, and what each of them uses.
type module struct {
	// uses has for each room the rooms that it uses, with the names that it uses there.
	uses map[string]map[string]map[string]bool

	// imports has for each room of packages the rooms that its packages import. The root
	// package is the room ".".
	imports map[string]map[string]map[string]bool

	// lines has the number of lines of each room's Go files.
	lines map[string]int
}

// names lists the names that an arrow stands for.
func (m *module) names(a arrow) []string { return slices.Sorted(maps.Keys(m.uses[a.from][a.to])) }

// A listed is what "go list -json" says of a package.
type listed struct {
	Dir        string
	ImportPath string
	Export     string // file with the export data
	GoFiles    []string
	CgoFiles   []string
	Imports    []string
	Module     *struct {
		Path string
		Main bool
	}
}

// A loader holds the packages that have been type-checked so far.
type loader struct {
	dir      string
	fset     *token.FileSet
	root     string             // import path of the root package
	own      map[string]*listed // packages of the module, by import path
	checked  map[string]*types.Package
	export   map[string]string // files with the export data of other packages, by import path
	external types.Importer
	files    map[string][]*ast.File // by import path
	infos    map[string]*types.Info // by import path
	owners   map[token.Pos]string   // names of the types whose fields are defined at these positions
}

// load reads the module whose root folder is dir. The packages of the module are
// type-checked from their source. What they import from elsewhere comes from export
// data, which the go command makes.
func load(dir string) (*module, error) {
	l := &loader{
		dir:     dir,
		fset:    token.NewFileSet(),
		own:     map[string]*listed{},
		checked: map[string]*types.Package{"unsafe": types.Unsafe},
		export:  map[string]string{},
		files:   map[string][]*ast.File{},
		infos:   map[string]*types.Info{},
		owners:  map[token.Pos]string{},
	}
	l.external = importer.ForCompiler(l.fset, "gc", l.open)
	// With cgo the files of ibv/rdmacore are listed. Nothing is compiled here, so this needs no C compiler.
	pkgs, err := l.list("1", "-json=Dir,ImportPath,GoFiles,CgoFiles,Imports,Module", "./...")
	if err != nil {
		return nil, err
	}
	others := map[string]bool{}
	for _, p := range pkgs {
		if p.Module == nil {
			return nil, fmt.Errorf("%s is in no module", p.ImportPath)
		}
		l.root = p.Module.Path
		l.own[p.ImportPath] = p
	}
	for _, p := range pkgs {
		for _, imported := range p.Imports {
			if l.own[imported] == nil && imported != "C" && imported != "unsafe" {
				others[imported] = true
			}
		}
	}
	if len(others) > 0 {
		args := append([]string{"-export", "-json=ImportPath,Export"}, slices.Sorted(maps.Keys(others))...)
		exported, err := l.list("0", args...)
		if err != nil {
			return nil, err
		}
		for _, p := range exported {
			l.export[p.ImportPath] = p.Export
		}
	}
	m := &module{
		uses:    map[string]map[string]map[string]bool{},
		imports: map[string]map[string]map[string]bool{},
		lines:   map[string]int{},
	}
	for _, p := range pkgs {
		if _, err := l.Import(p.ImportPath); err != nil {
			return nil, err
		}
	}
	for _, p := range pkgs {
		if err := l.add(m, p); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// list runs "go list" for linux/amd64. CGO_ENABLED is cgo.
func (l *loader) list(cgo string, args ...string) ([]*listed, error) {
	cmd := exec.Command("go", append([]string{"list"}, args...)...)
	cmd.Dir = l.dir
	cmd.Env = append(os.Environ(), "GOOS=linux", "GOARCH=amd64", "CGO_ENABLED="+cgo)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w\n%s", err, stderr.Bytes())
	}
	var pkgs []*listed
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		p := new(listed)
		switch err := dec.Decode(p); {
		case err == io.EOF:
			return pkgs, nil
		case err != nil:
			return nil, fmt.Errorf("go list: %w", err)
		}
		pkgs = append(pkgs, p)
	}
}

// open opens the export data of a package that is not in the module.
func (l *loader) open(importPath string) (io.ReadCloser, error) {
	name := l.export[importPath]
	if name == "" {
		return nil, fmt.Errorf("no export data of %s", importPath)
	}
	return os.Open(name)
}

// Import returns a package, and type-checks it first if it is a package of the module.
func (l *loader) Import(importPath string) (*types.Package, error) {
	if pkg := l.checked[importPath]; pkg != nil {
		return pkg, nil
	}
	p := l.own[importPath]
	if p == nil {
		return l.external.Import(importPath)
	}
	for _, name := range slices.Concat(p.GoFiles, p.CgoFiles) {
		f, err := parser.ParseFile(l.fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		l.files[importPath] = append(l.files[importPath], f)
	}
	info := &types.Info{Defs: map[*ast.Ident]types.Object{}, Uses: map[*ast.Ident]types.Object{}}
	var errs []error
	conf := types.Config{
		Importer:    l,
		FakeImportC: true, // names of C are taken as they are, so that no C compiler is needed
		Sizes:       types.SizesFor("gc", "amd64"),
		Error:       func(err error) { errs = append(errs, err) },
	}
	pkg, _ := conf.Check(importPath, l.fset, l.files[importPath], info)
	// Fields of C's structures are unknown here, so the errors of packages with cgo mean nothing.
	if len(errs) > 0 && len(p.CgoFiles) == 0 {
		return nil, fmt.Errorf("%s: %w", importPath, errors.Join(errs...))
	}
	l.infos[importPath] = info
	l.checked[importPath] = pkg
	for _, f := range l.files[importPath] {
		l.findOwners(f, info)
	}
	return pkg, nil
}

// findOwners notes which type each field of a file belongs to.
func (l *loader) findOwners(f *ast.File, info *types.Info) {
	ast.Inspect(f, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok {
			return true
		}
		ast.Inspect(spec.Type, func(n ast.Node) bool {
			if ident, ok := n.(*ast.Ident); ok {
				if v, ok := info.Defs[ident].(*types.Var); ok && v.IsField() {
					l.owners[v.Pos()] = spec.Name.Name
				}
			}
			return true
		})
		return false
	})
}

// nameOf is the name of an object. A method or a field has the name of its type in front.
func (l *loader) nameOf(obj types.Object) string {
	owner := ""
	switch obj := obj.(type) {
	case *types.Var:
		owner = l.owners[obj.Pos()]
	case *types.Func:
		if recv := obj.Signature().Recv(); recv != nil {
			t := recv.Type()
			if p, ok := t.(*types.Pointer); ok {
				t = p.Elem()
			}
			if named, ok := t.(*types.Named); ok {
				owner = named.Obj().Name()
			}
		}
	}
	if owner == "" {
		return obj.Name()
	}
	return owner + "." + obj.Name()
}

// folder is the room of a package, for the root package ".".
func (l *loader) folder(importPath string) string {
	rel := strings.TrimPrefix(strings.TrimPrefix(importPath, l.root), "/")
	if rel == "" {
		return "."
	}
	parts := strings.Split(rel, "/")
	return path.Join(parts[:min(2, len(parts))]...)
}

// roomAt is the room of what is defined at pos in a package of the module.
func (l *loader) roomAt(importPath string, pos token.Pos) string {
	if importPath == l.root {
		return filepath.Base(l.fset.PositionFor(pos, false).Filename)
	}
	return l.folder(importPath)
}

// add adds a package to m.
func (l *loader) add(m *module, p *listed) error {
	folder := l.folder(p.ImportPath)
	link(m.imports, folder, folder, "")
	for _, imported := range p.Imports {
		if l.own[imported] != nil {
			link(m.imports, folder, l.folder(imported), imported)
		}
	}
	info := l.infos[p.ImportPath]
	for _, f := range l.files[p.ImportPath] {
		room := l.roomAt(p.ImportPath, f.Package)
		link(m.uses, room, room, "")
		m.lines[room] += l.fset.File(f.Package).LineCount()
		ast.Inspect(f, func(n ast.Node) bool {
			ident, ok := n.(*ast.Ident)
			if !ok {
				return true
			}
			obj := info.Uses[ident]
			if obj == nil || obj.Pkg() == nil || l.own[obj.Pkg().Path()] == nil {
				return true
			}
			if _, ok := obj.(*types.PkgName); ok {
				return true // the name after the dot counts
			}
			link(m.uses, room, l.roomAt(obj.Pkg().Path(), obj.Pos()), l.nameOf(obj))
			return true
		})
	}
	return nil
}

// link notes that one room uses a name of another. A room that uses its own names
// is noted as one that exists.
func link(all map[string]map[string]map[string]bool, from, to, name string) {
	if all[from] == nil {
		all[from] = map[string]map[string]bool{}
	}
	if from == to {
		return
	}
	if all[from][to] == nil {
		all[from][to] = map[string]bool{}
	}
	all[from][to][name] = true
}
