package printed

import (
	"fmt"
	"log/slog"
	"reflect"
	"strings"
)

// Struct returns the exported fields of a struct that are not zero, as {Name:value Name:value}.
// Fields of embedded structs are among them. Memory and what has no text of its own is
// described, not printed.
func Struct(v any) string {
	var b strings.Builder
	b.WriteByte('{')
	for _, f := range fields(nil, reflect.ValueOf(v)) {
		if b.Len() > 1 {
			b.WriteByte(' ')
		}
		fmt.Fprintf(&b, "%s:%v", f.Key, f.Value)
	}
	b.WriteByte('}')
	return b.String()
}

// LogStruct returns what Struct prints as a group for log/slog, or as text where all fields
// are zero: handlers leave out groups without members.
func LogStruct(v any) slog.Value {
	attrs := fields(nil, reflect.ValueOf(v))
	if len(attrs) == 0 {
		return slog.StringValue("{}")
	}
	return slog.GroupValue(attrs...)
}

// Flags returns the names of the bits that are set in v, the lowest first, or "none". Bits
// without a name are one hexadecimal number.
func Flags(v uint64, names ...string) string {
	var set []string
	for i, name := range names {
		if v&(1<<i) != 0 {
			set = append(set, name)
		}
	}
	if rest := v &^ (1<<len(names) - 1); rest != 0 {
		set = append(set, fmt.Sprintf("%#x", rest))
	}
	if len(set) == 0 {
		return "none"
	}
	return strings.Join(set, "|")
}

func fields(list []slog.Attr, s reflect.Value) []slog.Attr {
	for i := range s.NumField() {
		f, v := s.Type().Field(i), s.Field(i)
		switch {
		case f.Anonymous && v.Kind() == reflect.Struct:
			list = fields(list, v)
		case f.IsExported() && !v.IsZero():
			list = append(list, slog.Any(f.Name, shown(v)))
		}
	}
	return list
}

// shown returns a number, a bool or a string for a field that is not zero.
func shown(v reflect.Value) any {
	switch x := v.Interface().(type) {
	case fmt.Stringer, error:
		return fmt.Sprint(x) // It takes a nil pointer in the interface, too.
	}
	switch v.Kind() {
	case reflect.Bool:
		return v.Bool()
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return v.Int()
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return v.Uint()
	case reflect.String:
		return v.String()
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return fmt.Sprintf("%d bytes", v.Len())
		}
		return fmt.Sprintf("%d elements", v.Len())
	}
	if v.Kind() == reflect.Interface && (v.Elem().Kind() != reflect.Pointer || !v.Elem().IsNil()) {
		if x, ok := v.Interface().(interface{ Name() string }); ok {
			return x.Name()
		}
	}
	return "set"
}
