package printed_test

import (
	"fmt"
	"testing"

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
