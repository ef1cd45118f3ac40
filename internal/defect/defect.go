// Package defect has the checks whose failure a test that passes the second time does not
// excuse. What a busy machine or an impatient test spoils may be tried again. But a leak (of
// a goroutine, a descriptor, a queue pair, registered memory or another resource of a device)
// and bytes that are lost or wrong are defects, also if they are seen only once.
//
// Whoever judges the output of tests finds these failures by Prefix, which nothing else
// prints. Data races, panics and fatal errors are found by the words of Go's runtime.
package defect

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"testing"
)

// Prefix begins the description of each defect.
const Prefix = "DEFECT: "

// Leak fails the test because something is left that should be gone. A test that has failed
// may have left it for that reason, so then it is no defect by itself.
func Leak(t testing.TB, format string, args ...any) {
	t.Helper()
	if t.Failed() {
		t.Errorf("left by the test that failed: "+format, args...)
		return
	}
	t.Errorf(Prefix+"leak: "+format, args...)
}

// Wrong returns an error for bytes that were compared while they came.
func Wrong(format string, args ...any) error {
	return fmt.Errorf(Prefix+"bytes are wrong: "+format, args...)
}

// Lost returns an error for bytes that are missing, although nothing had broken that could
// explain it.
func Lost(format string, args ...any) error {
	return fmt.Errorf(Prefix+"bytes lost: "+format, args...)
}

// Bytes fails the test at once if got is not what was sent, with the message that says what
// it was.
func Bytes[W, G string | []byte](t testing.TB, want W, got G, msgAndArgs ...any) {
	t.Helper()
	err := Differ([]byte(want), []byte(got))
	if err == nil {
		return
	}
	if len(msgAndArgs) > 0 {
		t.Fatalf("%v: %s", err, fmt.Sprintf(msgAndArgs[0].(string), msgAndArgs[1:]...))
	}
	t.Fatal(err)
}

// Differ says how what came differs from what was sent. It is nil if it does not.
func Differ(want, got []byte) error {
	if bytes.Equal(want, got) {
		return nil
	}
	first, wrong := 0, 0
	for i := min(len(want), len(got)) - 1; i >= 0; i-- {
		if want[i] != got[i] {
			first = i
			wrong++
		}
	}
	var shown string
	if len(want) <= 64 && len(got) <= 64 {
		shown = fmt.Sprintf(": %q and not %q", got, want)
	}
	switch {
	case wrong == 0 && len(got) < len(want):
		return Lost("%d of %d came, all as they were sent%s", len(got), len(want), shown)
	case wrong == 0:
		return fmt.Errorf(Prefix+"bytes too many: %d came, the first %d as they were sent%s", len(got), len(want), shown)
	case len(got) != len(want):
		return Wrong("the first of %d at offset %d is %#02x and not %#02x, and %d came where %d were sent%s",
			wrong, first, got[first], want[first], len(got), len(want), shown)
	default:
		return Wrong("the first of %d at offset %d is %#02x and not %#02x%s", wrong, first, got[first], want[first], shown)
	}
}

// ReadFull reads as many bytes as want has, and compares them. That the stream ends before
// them is a defect, so it is only for one that should not end there. Another error of r is
// returned as it is, unless wrong bytes came before it.
func ReadFull[W string | []byte](r io.Reader, want W) error {
	got := make([]byte, len(want))
	n, err := io.ReadFull(r, got)
	if n == len(got) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return Differ([]byte(want), got[:n])
	}
	if wrong := Differ([]byte(want)[:n], got[:n]); wrong != nil {
		return wrong
	}
	return err
}
