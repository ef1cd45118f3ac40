package main

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// write makes a module "m" of files and returns its folder.
func write(t *testing.T, files map[string]string) string {
	dir := t.TempDir()
	files = maps.Clone(files)
	files["go.mod"] = "module m\n\ngo 1.26.0\n"
	for name, text := range files {
		name = filepath.Join(dir, filepath.FromSlash(name))
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o755))
		require.NoError(t, os.WriteFile(name, []byte(text), 0o644))
	}
	return dir
}

// arrowsOf lists the arrows of a module, one a line, with their names.
func arrowsOf(m *module) string {
	var b strings.Builder
	for _, from := range slices.Sorted(maps.Keys(m.uses)) {
		for _, to := range slices.Sorted(maps.Keys(m.uses[from])) {
			fmt.Fprintf(&b, "%s -> %s: %s\n", from, to, strings.Join(m.names(arrow{from, to}), " "))
		}
	}
	return b.String()
}

func TestArrows(t *testing.T) {
	for _, test := range []struct {
		name  string
		files map[string]string
		want  string
	}{
		{"types, functions, constants and variables of another file", map[string]string{
			"a.go": "package m\n\ntype t int\n\nfunc f() {}\n\nconst c = 1\n\nvar v = 2\n",
			"b.go": "package m\n\nfunc g(t) int {\n\tf()\n\treturn c + v\n}\n",
		}, "b.go -> a.go: c f t v\n"},
		{"a method belongs to its file, which uses the type", map[string]string{
			"a.go": "package m\n\ntype t struct{}\n",
			"b.go": "package m\n\nfunc (*t) f() {}\n",
			"c.go": "package m\n\nfunc g(x interface{ f() }) { x.f() }\n\nvar h = func() { new(t).f() }\n",
		}, "b.go -> a.go: t\nc.go -> a.go: t\nc.go -> b.go: t.f\n"},
		{"fields, by selector, by key and promoted", map[string]string{
			"a.go": "package m\n\ntype inner struct{ x, y int }\n",
			"b.go": "package m\n\ntype outer struct {\n\tinner\n\tz struct{ w int }\n}\n",
			"c.go": "package m\n\nfunc f(o *outer) int { return o.x + o.z.w }\n\nvar i = outer{inner: inner{y: 1}}\n",
		}, "b.go -> a.go: inner\nc.go -> a.go: inner inner.x inner.y\nc.go -> b.go: outer outer.inner outer.w outer.z\n"},
		{"methods of an interface", map[string]string{
			"a.go": "package m\n\ntype i interface{ f() }\n",
			"b.go": "package m\n\ntype t struct{ i }\n",
			"c.go": "package m\n\nfunc g(x *t) { x.f() }\n",
		}, "b.go -> a.go: i\nc.go -> a.go: i.f\nc.go -> b.go: t\n"},
		{"generic types", map[string]string{
			"a.go": "package m\n\ntype box[T any] struct{ v T }\n\nfunc (b *box[T]) get() T { return b.v }\n",
			"b.go": "package m\n\nfunc f(b *box[int]) int { b.v = 1; return b.get() }\n",
		}, "b.go -> a.go: box box.get box.v\n"},
		{"local names are no use", map[string]string{
			"a.go": "package m\n\nfunc f() {}\n",
			"b.go": "package m\n\nfunc g(f func()) { f() }\n",
		}, ""},
		{"packages, the same name in the standard library, and what is built elsewhere", map[string]string{
			"a.go":         "package m\n\nimport (\n\t\"strings\"\n\n\t\"m/ibv\"\n)\n\nfunc f(d ibv.Device) string { return strings.ToUpper(d.Name()) }\n",
			"a_test.go":    "package m\n\nimport \"m/x\"\n\nvar _ = x.V\n",
			"a_windows.go": "package m\n\nimport \"m/x\"\n\nvar _ = x.V\n",
			"ibv/i.go":     "package ibv\n\ntype Device interface{ Name() string }\n",
			"x/x.go":       "package x\n\nvar V int\n",
			"x/y/y.go":     "package y\n\nimport \"m/ibv\"\n\nvar V ibv.Device\n",
			"x/y/z/z.go":   "package z\n\nimport \"m/x/y\"\n\nvar V = y.V.Name()\n",
		}, "a.go -> ibv: Device Device.Name\nx/y -> ibv: Device Device.Name\n"},
		{"a package with cgo, without a C compiler", map[string]string{
			"a.go":   "package m\n\nimport \"m/c\"\n\nvar _ = c.F()\n",
			"b.go":   "package m\n",
			"c/c.go": "package c\n\n// struct s { int x; };\nimport \"C\"\n\nfunc F() int { var s *C.struct_s; return int(s.x) + g() }\n",
			"c/d.go": "package c\n\nimport \"m/d\"\n\nfunc g() int { return d.V }\n",
			"d/d.go": "package d\n\nvar V int\n",
		}, "a.go -> c: F\nc -> d: V\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("CC", "there-is-no-such-compiler")
			m, err := load(write(t, test.files))
			require.NoError(t, err)
			assert.Equal(t, test.want, arrowsOf(m))
		})
	}
}

func TestLoadFails(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"syntax", "package m\n\nfunc {\n", "a.go:3"},
		{"types", "package m\n\nvar x int = \"\"\n", "a.go:3"},
		{"import", "package m\n\nimport \"m/nothing\"\n", "m/nothing"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := load(write(t, map[string]string{"a.go": test.text}))
			assert.ErrorContains(t, err, test.want)
		})
	}
}

func TestReport(t *testing.T) {
	m, err := load(write(t, map[string]string{
		"a.go":            "package m\n\nfunc a() { b() }\n",
		"b.go":            "package m\n\nfunc b() { a(); c() }\n",
		"c.go":            "package m\n\nfunc c() {}\n\nfunc d() { b() }\n",
		"e/f/one/one.go":  "package one\n\nimport _ \"m/g\"\n",
		"e/f/two/two.go":  "package two\n",
		"g/g.go":          "package g\n\nimport \"m/h\"\n\nvar V = h.V\n",
		"h/h.go":          "package h\n\nimport _ \"m/e/f/two\"\n\nvar V = 1\n",
		"h/not_tested.go": "package h\n",
	}))
	require.NoError(t, err)
	r := examine(m)
	var b bytes.Buffer
	require.NoError(t, r.print(&b))
	require.Len(t, r.upward, 2)
	text := b.String()
	assert.Contains(t, text, `rooms: 6 (3 files of the root package, 3 of other packages)
arrows: 5
import circles among packages: 1
  e/f, g, h
upward arrows: 2
`)
	for _, up := range r.upward {
		assert.Contains(t, text, fmt.Sprintf("  %s -> %s: %s\n", up.from, up.to, strings.TrimSuffix(up.to, ".go")))
	}
	assert.Contains(t, text, fmt.Sprintf("    %-24s %5d lines\n", "h", 6))
}
