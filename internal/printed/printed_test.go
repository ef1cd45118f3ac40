package printed_test

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/rdmanet/rdmanet/internal/printed"
)

type secret struct{ b []byte }

func (secret) Format(s fmt.State, verb rune) { printed.Format(s, verb, "a text") }

func TestFormat(t *testing.T) {
	v := &secret{b: []byte("payload")}
	for format, want := range map[string]string{
		"%v": "a text", "%+v": "a text", "%#v": "a text", "%s": "a text", "%d": "a text", "%t": "a text", "%08.3f": "00000a t",
		"%q": `"a text"`, "%#q": "`a text`", "%x": "612074657874", "%X": "612074657874", "% x": "61 20 74 65 78 74",
		"%8v|": "  a text|", "%-8v|": "a text  |", "%.1v": "a", "%T": "*printed_test.secret",
	} {
		assert.Equal(t, want, fmt.Sprintf(format, v), format)
	}
}

type named struct{}

func (*named) Name() string { return "a name" }

type inner struct {
	Embedded int
	hidden   int
}

type sample struct {
	inner
	Bool     bool
	Int      int32
	Uint     uint64
	Text     string
	Duration time.Duration
	Memory   []byte
	List     []int
	Func     func()
	Pointer  *int
	Any      any
	Err      error
	secret   []byte
}

func TestStruct(t *testing.T) {
	for _, tt := range []struct {
		v    sample
		want string
	}{
		{sample{}, "{}"},
		{sample{inner: inner{hidden: 1}, secret: []byte("payload"), Memory: []byte{}[:0:0]}, "{Memory:0 bytes}"},
		{sample{inner: inner{Embedded: 1}, Bool: true, Int: -2, Uint: 3, Text: "x"}, "{Embedded:1 Bool:true Int:-2 Uint:3 Text:x}"},
		{sample{Duration: time.Second, Memory: []byte("payload"), List: make([]int, 2)}, "{Duration:1s Memory:7 bytes List:2 elements}"},
		{sample{Func: func() {}, Pointer: new(int), Err: errors.New("no")}, "{Func:set Pointer:set Err:no}"},
		{sample{Any: new(named)}, "{Any:a name}"},
		{sample{Any: (*named)(nil)}, "{Any:set}"},
		{sample{Any: (*netip.Addr)(nil)}, "{Any:<nil>}"},
		{sample{Any: map[string]string{"a": "payload"}}, "{Any:set}"},
	} {
		assert.Equal(t, tt.want, printed.Struct(tt.v))
	}
	group := printed.LogStruct(sample{Uint: 3, Text: "x"})
	assert.Equal(t, slog.GroupValue(slog.Uint64("Uint", 3), slog.String("Text", "x")).String(), group.String())
	assert.Equal(t, slog.StringValue("{}"), printed.LogStruct(sample{}))
}

func TestFlags(t *testing.T) {
	assert.Equal(t, "none", printed.Flags(0, "a", "b"))
	assert.Equal(t, "a", printed.Flags(1, "a", "b"))
	assert.Equal(t, "a|b|0xc", printed.Flags(15, "a", "b"))
}
