// Package printedtest checks that the values of a package are printed in one short line
// without their payload.
package printedtest

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"path"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Secret is the payload of the values, repeated until their memory is full.
const Secret = "a secret that a peer has sent; "

// Payload returns n bytes of Secret.
func Payload(n int) []byte { return bytes.Repeat([]byte(Secret), n/len(Secret)+1)[:n] }

// verbs are the verbs of package fmt, each with the flags that change the output. fmt calls
// no method for %T, and for %p, which prints an address.
func verbs() []string {
	var list []string
	for _, verb := range "vsqdxXoObtcUeEfFgG" {
		for _, flag := range []string{"", "+", "#", "+#", " ", "-", "0"} {
			list = append(list, "%"+flag+string(verb))
		}
	}
	return list
}

// limit is the greatest length of a line with one value. The longest lines are those of
// structs of a hundred counters, by a verb that is not for numbers.
const limit = 8 << 10

// Check prints each value by every verb and by both handlers of log/slog, alone and in
// other values. values must have every exported type of the package in the current
// directory, by its name, except interfaces.
func Check(t *testing.T, values map[string]any) {
	for _, name := range exported(t) {
		assert.Contains(t, values, name, "an exported type that is not tested for what it prints")
	}
	for name, v := range values {
		t.Run(name, func(t *testing.T) {
			for _, format := range verbs() {
				check(t, format, fmt.Sprintf(format, v))
				check(t, format+" in a slice", fmt.Sprintf(format, []any{v}))
				check(t, format+" in a struct", fmt.Sprintf(format, struct{ V any }{v}))
			}
			for handler, log := range handlers() {
				var b strings.Builder
				slog.New(log(&b)).Info("message", "value", v)
				check(t, handler, b.String())
				assert.NotContains(t, b.String(), "panicked")
			}
			rv := reflect.ValueOf(v)
			switch {
			case rv.Kind() != reflect.Pointer:
				p := reflect.New(rv.Type())
				p.Elem().Set(rv)
				for _, format := range verbs() {
					check(t, format+" of a pointer", fmt.Sprintf(format, p.Interface()))
				}
			case ast.IsExported(rv.Type().Elem().Name()): // Other packages cannot make zero values of the other types.
				zeros(t, rv.Type())
			}
		})
	}
}

// CheckMethods is Check for a package whose exported types all have a String method, or
// Error, and a LogValue method.
func CheckMethods(t *testing.T, values map[string]any) {
	Check(t, values)
	for _, name := range exported(t) {
		v := values[name]
		assert.Equal(t, name, strings.TrimPrefix(path.Ext(fmt.Sprintf("%T", v)), "."), "the type of the value")
		if _, isError := v.(error); !isError {
			assert.Implements(t, (*fmt.Stringer)(nil), v)
		}
		assert.Implements(t, (*slog.LogValuer)(nil), v)
	}
}

// zeros checks that a nil pointer and a zero value can be printed without a panic.
func zeros(t *testing.T, typ reflect.Type) {
	for _, v := range []any{reflect.Zero(typ).Interface(), reflect.New(typ.Elem()).Interface()} {
		for _, format := range verbs() {
			assert.NotContains(t, fmt.Sprintf(format, v), "PANIC", format)
		}
		for handler, log := range handlers() {
			var b strings.Builder
			slog.New(log(&b)).Info("message", "value", v)
			assert.NotContains(t, b.String(), "panic", handler)
		}
	}
}

func handlers() map[string]func(*strings.Builder) slog.Handler {
	return map[string]func(*strings.Builder) slog.Handler{
		"text handler": func(b *strings.Builder) slog.Handler { return slog.NewTextHandler(b, nil) },
		"JSON handler": func(b *strings.Builder) slog.Handler { return jsonHandler{slog.NewJSONHandler(b, nil), b} },
	}
}

// jsonHandler adds a line if the handler has written something that is not JSON.
type jsonHandler struct {
	slog.Handler
	b *strings.Builder
}

func (h jsonHandler) Handle(ctx context.Context, r slog.Record) error {
	err := h.Handler.Handle(ctx, r)
	if !json.Valid([]byte(h.b.String())) {
		h.b.WriteString("panicked: no JSON")
	}
	return err
}

func check(t *testing.T, what, s string) {
	t.Helper()
	if len(s) > limit {
		t.Errorf("%s: %d bytes: %.200s...", what, len(s), s)
		return
	}
	word := []byte("secret")
	decimal := strings.Trim(fmt.Sprint(word), "[]")
	for form, found := range map[string]string{
		"as it is": string(word), "decimal": decimal, "by %#v": strings.TrimSuffix(strings.SplitN(fmt.Sprintf("%#v", word), "{", 2)[1], "}"),
		"hexadecimal": hex.EncodeToString(word), "octal": strings.Trim(fmt.Sprintf("%o", word), "[]"), "binary": strings.Trim(fmt.Sprintf("%b", word), "[]"),
		"base64": base64.StdEncoding.EncodeToString([]byte("secret")), "base64, one on": base64.StdEncoding.EncodeToString([]byte("ret")),
	} {
		if strings.Contains(strings.ToLower(s), strings.ToLower(found)) {
			t.Errorf("%s has payload in it, %s: %.200s", what, form, s)
		}
	}
}

// CheckFlags compares the text of each bit with the name of its constant. The constants of a
// type are the bits from 1 on, in one block, and their names begin with prefix.
func CheckFlags(t *testing.T, typ, prefix string, text func(bit uint64) string) {
	t.Helper()
	bit := uint64(0)
	for _, file := range parse(t) {
		for _, d := range file.Decls {
			block, ok := d.(*ast.GenDecl)
			if !ok || block.Tok != token.CONST {
				continue
			}
			of := ""
			for i, s := range block.Specs {
				spec := s.(*ast.ValueSpec)
				if name, ok := spec.Type.(*ast.Ident); ok {
					of = name.Name
				}
				if name := spec.Names[0].Name; of == typ && (i == 0 || len(spec.Values) == 0) {
					bit = max(1, bit<<1)
					assert.Equal(t, strings.TrimPrefix(name, prefix), text(bit))
				}
			}
		}
	}
	assert.NotZero(t, bit, "no constants of this type")
	assert.Equal(t, "none", text(0))
}

// parse returns the files of the package, for all systems, without those of its tests.
func parse(t *testing.T) (list []*ast.File) {
	t.Helper()
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		require.NoError(t, err)
		list = append(list, file)
	}
	return list
}

// exported returns the names of the package's exported types, except interfaces.
func exported(t *testing.T) []string {
	var names []string
	for _, file := range parse(t) {
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok {
				return true
			}
			if _, is := spec.Type.(*ast.InterfaceType); !is && spec.Name.IsExported() {
				names = append(names, spec.Name.Name)
			}
			return false
		})
	}
	require.NotEmpty(t, names)
	return names
}
