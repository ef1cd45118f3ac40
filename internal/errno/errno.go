// Package errno has the error numbers that Go's syscall package lacks on Plan 9, whose
// system calls fail with texts. Elsewhere they are those of syscall, which errors.Is
// finds.
package errno
