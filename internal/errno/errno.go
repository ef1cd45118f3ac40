// Package errno has the error numbers that Go's syscall package lacks on Plan 9. The system
// calls of Plan 9 fail with texts. On other systems the errors are those of package
// syscall, which errors.Is matches.
package errno
